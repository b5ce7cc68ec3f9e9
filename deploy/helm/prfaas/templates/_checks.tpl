{{- /* Values that are each well formed and make no sense together. Each message names its key. */ -}}
{{- define "prfaas.checks" -}}
{{- $values := .Values -}}
{{- $pd := eq $values.site.role "pd" -}}
{{- $roles := list -}}
{{- $names := list -}}
{{- $nodes := list -}}
{{- range $index, $host := $values.hosts -}}
  {{- $place := printf "hosts[%d]" $index -}}
  {{- $names = append $names $host.name -}}
  {{- if eq $values.pool.mode "Sidecar" -}}
    {{- if ne (len $host.engines) 1 }}{{ fail (printf "%s.engines: there are %d, and with pool.mode Sidecar every engine has a pool node of its own; list a host for each engine" $place (len $host.engines)) }}{{ end -}}
  {{- else -}}
    {{- if not $host.node }}{{ fail (printf "%s.node: missing; with pool.mode DaemonSet a pool node and its engines share a socket of one node" $place) }}{{ end -}}
    {{- if has $host.node $nodes }}{{ fail (printf "%s.node: %q is another host's; one pool node a node" $place $host.node) }}{{ end -}}
    {{- $nodes = append $nodes $host.node -}}
  {{- end -}}
  {{- range $number, $engine := $host.engines -}}
    {{- $names = append $names $engine.name -}}
    {{- $role := $engine.role | default "both" -}}
    {{- $roles = append $roles $role -}}
    {{- if and (not $pd) (ne $role "both") }}{{ fail (printf "%s.engines[%d].role: %q, and engines have a role at PD sites only; leave it out" $place $number $role) }}{{ end -}}
    {{- $place := printf "%s.engines[%d]" $place $number -}}
    {{- with $engine.maxReplicas -}}
      {{- if not $pd }}{{ fail (printf "%s.maxReplicas: engines of a PrfaaS site are listed one by one at the PD site, and each has a certificate; give each an entry" $place) }}{{ end -}}
      {{- if eq $role "decode" }}{{ fail (printf "%s.maxReplicas: engines are scaled by their prefill work, and this one only decodes; leave it out" $place) }}{{ end -}}
      {{- if eq $values.pool.mode "Sidecar" }}{{ fail (printf "%s.maxReplicas: with pool.mode Sidecar each engine has a pool node of its own; scaled engines need pool.mode DaemonSet" $place) }}{{ end -}}
      {{- if ne $values.engines.kind "Deployment" }}{{ fail (printf "%s.maxReplicas: scaled engines are a StatefulSet, and engines.kind is %q; set it to Deployment" $place $values.engines.kind) }}{{ end -}}
      {{- if not $values.membership.endpointSlices }}{{ fail (printf "%s.maxReplicas: gateways learn of scaled engines by EndpointSlices; set membership.endpointSlices to true" $place) }}{{ end -}}
      {{- if not $values.monitoring.prometheusUrl }}{{ fail (printf "monitoring.prometheusUrl: missing; %s.maxReplicas asks Prometheus" $place) }}{{ end -}}
      {{- if gt (int64 ($engine.minReplicas | default 1)) (int64 .) }}{{ fail (printf "%s.minReplicas: %d is above maxReplicas, %d" $place (int64 $engine.minReplicas) (int64 .)) }}{{ end -}}
      {{- if ge (int64 $values.engines.autoscaling.drainSeconds) (int64 $values.engines.stopSeconds) }}{{ fail (printf "engines.autoscaling.drainSeconds: %d is not below engines.stopSeconds, %d, after which a pod is killed" (int64 $values.engines.autoscaling.drainSeconds) (int64 $values.engines.stopSeconds)) }}{{ end -}}
    {{- else -}}
      {{- if $engine.minReplicas }}{{ fail (printf "%s.maxReplicas: missing beside minReplicas" $place) }}{{ end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if not (has "both" $roles) -}}
  {{- if ne (len (uniq $roles)) 2 }}{{ fail (printf "hosts[].engines[].role: all are %q; prefill and decode need each other" (first $roles)) }}{{ end -}}
{{- else if gt (len (uniq $roles)) 1 }}{{ fail "hosts[].engines[].role: some are \"both\"; give all engines a role, or none" }}{{ end -}}
{{- $withCa := 0 -}}
{{- range $index, $peer := $values.site.peers -}}
  {{- $place := printf "site.peers[%d]" $index -}}
  {{- if eq $peer.name $values.site.name }}{{ fail (printf "%s.name: %q is this site's own name" $place $peer.name) }}{{ end -}}
  {{- if $peer.ca }}{{ $withCa = add1 $withCa }}{{ end -}}
  {{- if and $values.networkPolicy.enabled (not $peer.cidrs) }}{{ fail (printf "%s.cidrs: empty, and the NetworkPolicies would let nobody of %s in; list the addresses it comes from, or set networkPolicy.enabled to false" $place $peer.name) }}{{ end -}}
  {{- $pools := list -}}
  {{- range $number, $pool := $peer.pools -}}
    {{- $pools = append $pools $pool.name -}}
    {{- if not (or $pool.address $peer.address) }}{{ fail (printf "%s.pools[%d].address: missing; give it, or %s.address for NAME.ADDRESS:7100" $place $number $place) }}{{ end -}}
  {{- end -}}
  {{- $names = concat $names $pools -}}
  {{- if $pd -}}
    {{- if not $peer.engines }}{{ fail (printf "%s.engines: missing; the gateway of a PD site sends prompts to the engines of %s" $place $peer.name) }}{{ end -}}
    {{- if $peer.gateways }}{{ fail (printf "%s.gateways: PrfaaS sites have no gateway; leave it out" $place) }}{{ end -}}
    {{- range $number, $engine := $peer.engines -}}
      {{- $names = append $names $engine.name -}}
      {{- if not (has $engine.pool $pools) }}{{ fail (printf "%s.engines[%d].pool: %q is none of %s.pools: %s" $place $number $engine.pool $place (join ", " $pools)) }}{{ end -}}
      {{- if not (or $engine.url $peer.address) }}{{ fail (printf "%s.engines[%d].url: missing; give it, or %s.address for https://NAME.ADDRESS:8100" $place $number $place) }}{{ end -}}
    {{- end -}}
  {{- else -}}
    {{- if not $peer.gateways }}{{ fail (printf "%s.gateways: missing; pool nodes let in the gateways that are named" $place) }}{{ end -}}
    {{- if $peer.engines }}{{ fail (printf "%s.engines: a PrfaaS site reaches no engine of a PD site; leave it out" $place) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- if and $withCa (not $values.site.ca) }}{{ fail "site.ca: missing beside site.peers[].ca; pods trust what is listed, so give this site's own authority too" }}{{ end -}}
{{- if $pd }}{{ $names = append $names $values.gateway.name }}{{ end -}}
{{- range $name := uniq $names -}}
  {{- $count := 0 }}{{ range $names }}{{ if eq . $name }}{{ $count = add1 $count }}{{ end }}{{ end -}}
  {{- if gt (int $count) 1 }}{{ fail (printf "hosts, site.peers, gateway.name: %d parts are called %q; names are identities" $count $name) }}{{ end -}}
{{- end -}}
{{- if and $pd (not $values.gateway.salt.existingSecret) }}{{ fail "gateway.salt.existingSecret: missing; without one secret for all replicas no gateway finds another's blocks: kubectl create secret generic prfaas-salt --from-literal=tenant.salt=$(openssl rand -hex 32)" }}{{ end -}}
{{- if and $pd (lt (int64 $values.routing.offloadThreshold) 1) }}{{ fail "routing.offloadThreshold: missing; new tokens above which a prompt is offloaded, as `prfaas plan` prints it" }}{{ end -}}
{{- if and (eq $values.certificates.source "cert-manager") (not $values.certificates.issuerRef.name) }}{{ fail "certificates.issuerRef.name: missing; the Issuer that signs identities" }}{{ end -}}
{{- if and (eq $values.certificates.source "existingSecret") (not $values.certificates.existingSecret) }}{{ fail "certificates.existingSecret: missing; a Secret with ca.pem and NAME.pem, NAME.key of every part" }}{{ end -}}
{{- $disk := $values.pool.disk -}}
{{- if ne (empty $disk.limit) (empty $disk.hostPath) }}{{ fail "pool.disk: give limit and hostPath together, or neither" }}{{ end -}}
{{- if and $disk.keysSecret (not $disk.limit) }}{{ fail "pool.disk.limit: missing beside keysSecret" }}{{ end -}}
{{- if and $disk.keysSecret (not $disk.sealed) }}{{ fail "pool.disk.sealed: false beside keysSecret; leave one of them out" }}{{ end -}}
{{- if and $disk.limit $disk.sealed (not $disk.keysSecret) }}{{ fail "pool.disk.keysSecret: missing; kubectl create secret generic prfaas-disk-keys --from-literal=site.keys=$(openssl rand -base64 32), or set pool.disk.sealed to false for blocks in the clear" }}{{ end -}}
{{- $s3 := $values.pool.s3 -}}
{{- if and $s3.bucket (not $s3.limit) }}{{ fail "pool.s3.limit: missing; what each pool node keeps in the bucket at most" }}{{ end -}}
{{- if and $s3.bucket (not $s3.keysSecret) }}{{ fail "pool.s3.keysSecret: missing; kubectl create secret generic prfaas-site-keys --from-literal=site.keys=$(openssl rand -base64 32)" }}{{ end -}}
{{- if and (not $s3.bucket) (or $s3.limit $s3.keysSecret $s3.credentialsSecret $s3.endpoint $s3.region $s3.prefix $s3.dataRegion) }}{{ fail "pool.s3.bucket: missing beside the other keys of pool.s3" }}{{ end -}}
{{- if $s3.bucket -}}
  {{- $object := int64 (include "prfaas.bytes" $s3.objectSize) -}}
  {{- if or (lt $object 4194304) (gt $object 67108864) }}{{ fail (printf "pool.s3.objectSize: %s; the limits are 4MiB and 64MiB" $s3.objectSize) }}{{ end -}}
  {{- if lt (int64 (include "prfaas.bytes" $s3.limit)) (mul 2 $object) }}{{ fail (printf "pool.s3.limit: %s holds fewer than two objects of %s (pool.s3.objectSize)" $s3.limit $s3.objectSize) }}{{ end -}}
{{- end -}}
{{- $store := $values.pool.mooncake -}}
{{- if and $store.master $s3.bucket }}{{ fail "pool.mooncake.master: there is pool.s3.bucket too; a site has one shared tier" }}{{ end -}}
{{- if and $store.master (not $store.keysSecret) }}{{ fail "pool.mooncake.keysSecret: missing; kubectl create secret generic prfaas-site-keys --from-literal=site.keys=$(openssl rand -base64 32)" }}{{ end -}}
{{- if and (not $store.master) (or $store.keysSecret $store.prefix $store.devices $store.dataRegion) }}{{ fail "pool.mooncake.master: missing beside the other keys of pool.mooncake" }}{{ end -}}
{{- if and $store.devices (ne $store.protocol "rdma") }}{{ fail (printf "pool.mooncake.devices: devices of RDMA, and pool.mooncake.protocol is %q" $store.protocol) }}{{ end -}}
{{- $buffer := int64 (include "prfaas.bytes" $store.buffer) -}}
{{- if or (lt $buffer 16777216) (gt $buffer 17179869184) }}{{ fail (printf "pool.mooncake.buffer: %s; the limits are 16MiB and 16GiB" $store.buffer) }}{{ end -}}
{{- $region := $values.site.region -}}
{{- range $index, $peer := $values.site.peers -}}
  {{- if and $region (not $peer.region) }}{{ fail (printf "site.peers[%d].region: missing; site.region is %q, and if one site has a region, all need one" $index $region) }}{{ end -}}
  {{- if and $peer.region (not $region) }}{{ fail (printf "site.region: missing; site.peers[%d].region is %q, and if one site has a region, all need one" $index $peer.region) }}{{ end -}}
{{- end -}}
{{- if and $s3.bucket $region (not $s3.dataRegion) }}{{ fail "pool.s3.dataRegion: missing; the site has a region, and a bucket can be in another one" }}{{ end -}}
{{- range $key, $found := dict "pool.s3.dataRegion" $s3.dataRegion "pool.mooncake.dataRegion" $store.dataRegion -}}
  {{- if and $found (ne $found $region) }}{{ fail (printf "%s: %q, and site.region is %q; gateways know one region of a site, so its tier has to be there" $key $found $region) }}{{ end -}}
{{- end -}}
{{- if and $values.gateway.regions (not $region) }}{{ fail "gateway.regions: site.region is missing; sites without regions have none in their certificates" }}{{ end -}}
{{- if and $values.gateway.regions (not (has $region $values.gateway.regions)) }}{{ fail (printf "gateway.regions: %q, the site's own, is missing; its pool nodes would refuse every ticket" $region) }}{{ end -}}
{{- if and (eq $values.engines.server "vllm") (not $values.engines.image) }}{{ fail "engines.image: missing; an image with vLLM and prfaas, such as the target \"engine\" of Containerfile" }}{{ end -}}
{{- if and (eq $values.engines.server "timing") (not (contains "timing" (lower $values.model.name))) }}{{ fail (printf "model.name: %q, and timing engines compute nothing; put \"timing\" into the name" $values.model.name) }}{{ end -}}
{{- $args := append $values.engines.args "" -}}
{{- range $index, $arg := $values.engines.args -}}
  {{- $words := splitn "=" 2 (toString $arg) -}}
  {{- $name := $words._0 | replace "_" "-" -}}
  {{- $value := default (toString (index $args (add1 $index))) $words._1 -}}
  {{- if or (and (has $name (list "--nnodes" "-n")) (ne $value "1")) (has $name (list "--headless" "--data-parallel-hybrid-lb" "-dph")) (and (has $name (list "--distributed-executor-backend" "--data-parallel-backend" "-dpb")) (not (has $value (list "mp" "uni")))) }}{{ fail (printf "engines.args[%d]: %q puts ranks of an engine on several hosts, or may; its KV blocks go through the shared memory of one pod, so list an engine in hosts for each host" $index (toString $arg)) }}{{ end -}}
{{- end -}}
{{- $route := $values.gateway.route -}}
{{- if and (not $pd) (ne $route.kind "none") }}{{ fail (printf "gateway.route.kind: %q, and a PrfaaS site has no gateway; set it at the PD site" $route.kind) }}{{ end -}}
{{- if and (eq $route.kind "HTTPRoute") (not $route.parentRefs) }}{{ fail "gateway.route.parentRefs: missing; the Gateway that an HTTPRoute belongs to" }}{{ end -}}
{{- if and (eq $route.kind "Ingress") (not $route.hostnames) }}{{ fail "gateway.route.hostnames: missing; an Ingress without one would take every host" }}{{ end -}}
{{- $scaling := $values.gateway.autoscaling -}}
{{- if $scaling.enabled -}}
  {{- if not $values.monitoring.prometheusUrl }}{{ fail "monitoring.prometheusUrl: missing; gateway.autoscaling asks Prometheus" }}{{ end -}}
  {{- if gt (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas) }}{{ fail (printf "gateway.autoscaling.minReplicas: %d is above maxReplicas, %d" (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas)) }}{{ end -}}
{{- end -}}
{{- if and $pd (not $scaling.enabled) (ge (int64 $values.gateway.pdb.minAvailable) (int64 $values.gateway.replicas)) (gt (int64 $values.gateway.replicas) 1) }}{{ fail (printf "gateway.pdb.minAvailable: %d of %d replicas, so no node could be drained; lower it" (int64 $values.gateway.pdb.minAvailable) (int64 $values.gateway.replicas)) }}{{ end -}}
{{- end }}
