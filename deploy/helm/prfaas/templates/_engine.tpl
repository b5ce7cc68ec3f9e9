{{- /* Annotations of a Service that other sites reach: (dict "root" $ "part" NAME) */ -}}
{{- define "prfaas.exposed" -}}
{{- $annotations := deepCopy .root.Values.expose.annotations -}}
{{- with .root.Values.site.address }}{{ $_ := set $annotations "external-dns.alpha.kubernetes.io/hostname" (printf "%s.%s" $.part .) }}{{ end -}}
{{- with $annotations }}
annotations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Name of an engine: that of its pod, where there are several. */ -}}
{{- define "prfaas.engine.name" -}}
{{- if .engine.maxReplicas }}$(POD_NAME){{ else }}{{ .engine.name }}{{ end -}}
{{- end }}

{{- define "prfaas.timing.args" -}}
{{- $values := .root.Values -}}
{{- $timing := $values.engines.timing -}}
- {{ printf "--engine=%s=0.0.0.0:%d" (include "prfaas.engine.name" .) $values.engines.port | quote }}
- {{ printf "--plan=%s" $timing.plan | quote }}
{{- with $timing.cluster }}
- {{ printf "--cluster=%s" . | quote }}
{{- end }}
- {{ printf "--model=%s" $values.model.name | quote }}
- {{ printf "--model-path=%s" $values.model.path | quote }}
- --pool=/run/prfaas/pool.sock
- --host-memory={{ $values.engines.hostMemory }}
- --time-scale={{ $timing.timeScale }}
- --bytes-scale={{ $timing.bytesScale }}
- --block-tokens={{ int64 $timing.blockTokens }}
{{- if include "prfaas.kvEvents" .root }}
- --kv-events={{ include "prfaas.engine.name" . }}=tcp://0.0.0.0:5557,tcp://0.0.0.0:5558
{{- end }}
{{- end }}

{{- define "prfaas.vllm.args" -}}
{{- $values := .root.Values -}}
{{- $extra := dict "cpu_bytes_to_use" (int64 (include "prfaas.bytes" $values.engines.hostMemory)) "prfaas_engine" (include "prfaas.engine.name" .) "prfaas_pool" "/run/prfaas/pool.sock" -}}
{{- $transfer := dict "kv_connector" "PrfaasConnector" "kv_connector_module_path" "prfaas.engines.vllm_connector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra -}}
{{- $events := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" "tcp://*:5557" "replay_endpoint" "tcp://*:5558" -}}
- {{ printf "--model=%s" $values.model.path | quote }}
- {{ printf "--served-model-name=%s" $values.model.name | quote }}
- --host=0.0.0.0
- --port={{ $values.engines.port }}
- --allowed-media-domains=none.invalid
- --enable-prefix-caching
- --prefix-caching-hash-algo=sha256_cbor
- --middleware=prfaas.engines.vllm_forget.ForgetRoute
- --enable-prompt-tokens-details
- {{ printf "--kv-transfer-config=%s" (toJson $transfer) | quote }}
{{- if include "prfaas.kvEvents" .root }}
- {{ printf "--kv-events-config=%s" (toJson $events) | quote }}
{{- end }}
{{- if include "prfaas.engineTls" .root }}
- --ssl-certfile=/etc/prfaas/identity/{{ .engine.name }}.pem
- --ssl-keyfile=/etc/prfaas/identity/{{ .engine.name }}.key
- --ssl-ca-certs=/etc/prfaas/identity/ca.pem
- --ssl-cert-reqs=2
- --enable-ssl-refresh
{{- end }}
{{- range $values.engines.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "prfaas.engine.container" -}}
{{- $values := .root.Values -}}
{{- $engines := $values.engines -}}
{{- $tls := include "prfaas.engineTls" .root -}}
name: engine
{{- if eq $engines.server "timing" }}
image: {{ include "prfaas.image" (dict "root" .root "image" .host.image) | quote }}
command: [prfaas, engine, timing]
args:
  {{- include "prfaas.timing.args" . | nindent 2 }}
{{- else }}
image: {{ .engine.image | default $engines.image | quote }}
command: [python3, -m, vllm.entrypoints.openai.api_server]
args:
  {{- include "prfaas.vllm.args" . | nindent 2 }}
{{- end }}
imagePullPolicy: {{ $values.image.pullPolicy }}
env:
  {{- if .engine.maxReplicas }}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- end }}
  - {name: PYTHONHASHSEED, value: "0"}
  - {name: VLLM_NO_USAGE_STATS, value: "1"}
  - {name: VLLM_MEDIA_URL_ALLOW_REDIRECTS, value: "0"}
  - {name: DO_NOT_TRACK, value: "1"}
  - {name: VLLM_LOGGING_PREFIX, value: ""}
  - {name: HOME, value: /home/prfaas}
  - {name: USER, value: prfaas}
  {{- with $engines.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: {{ $engines.port }}}
  {{- if include "prfaas.kvEvents" .root }}
  - {name: kv-events, containerPort: 5557}
  - {name: kv-replay, containerPort: 5558}
  {{- end }}
{{- if $tls }}
# The kubelet has no certificate that the engine would accept: an open port is what it can see.
startupProbe:
  tcpSocket: {port: http}
  periodSeconds: 10
  failureThreshold: {{ ceil (divf $engines.startSeconds 10) }}
livenessProbe:
  tcpSocket: {port: http}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  tcpSocket: {port: http}
  periodSeconds: 5
{{- else }}
startupProbe:
  httpGet: {path: /v1/models, port: http}
  periodSeconds: 10
  failureThreshold: {{ ceil (divf $engines.startSeconds 10) }}
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
{{- if .engine.maxReplicas }}
# The gateway sends nothing new to a pod that terminates; its requests end before the engine is stopped.
lifecycle:
  preStop:
    exec: {command: [sleep, {{ $engines.autoscaling.drainSeconds | quote }}]}
{{- end }}
{{- with $engines.resources }}
resources: {{ toYaml . | nindent 2 }}
{{- end }}
{{ include "prfaas.confined" (dict "readOnly" (eq $engines.server "timing")) }}
volumeMounts:
  - {name: socket, mountPath: /run/prfaas{{ if not .sidecar }}, readOnly: true{{ end }}}
  - {name: shm, mountPath: /dev/shm}
  - {name: home, mountPath: /home/prfaas}
  - {name: tmp, mountPath: /tmp}
  {{- if $tls }}
  {{- include "prfaas.identityMount" "engine-identity" | nindent 2 }}
  {{- end }}
  {{- include "prfaas.modelMount" .root | indent 2 }}
{{- end }}

{{- /* Pod of an engine: (dict "root" $ "host" HOST "engine" ENGINE "sidecar" BOOL) */ -}}
{{- define "prfaas.engine.pod" -}}
{{- $values := .root.Values -}}
{{- $mebibytes := div (int64 (include "prfaas.bytes" $values.engines.hostMemory)) 1048576 -}}
{{- $tls := include "prfaas.engineTls" .root -}}
metadata:
  labels:
    {{- include "prfaas.selector" .root | nindent 4 }}
    prfaas/engine: {{ quote .engine.name }}
    {{- if .sidecar }}
    prfaas/pool: {{ quote .host.name }}
    {{- end }}
    prfaas/job: prfaas-engine
    app.kubernetes.io/component: engine
  {{- if .sidecar }}
  {{- include "prfaas.pool.annotations" . | nindent 2 }}
  {{- end }}
spec:
  {{- include "prfaas.pod" .root | nindent 2 }}
  {{- include "prfaas.nodeSelector" (dict "root" .root "node" .host.node) | nindent 2 }}
  {{- with $values.engines.runtimeClassName }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $values.engines.stopSeconds }}
  {{- if .sidecar }}
  initContainers:
    {{- if $values.pool.disk.limit }}
    {{- include "prfaas.pool.folders" . | nindent 4 }}
    {{- end }}
    - {{- include "prfaas.pool.container" . | nindent 6 }}
  {{- end }}
  containers:
    - {{- include "prfaas.engine.container" . | nindent 6 }}
  volumes:
    {{- if .sidecar }}
    {{- include "prfaas.pool.volumes" (dict "root" .root "host" .host) | nindent 4 }}
    - name: socket
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    {{- else }}
    - name: socket
      hostPath: {path: {{ printf "%s/%s" $values.pool.socketHostPath (include "prfaas.fullname" .root) | quote }}, type: DirectoryOrCreate}
    - name: tmp
      emptyDir: {}
    {{- end }}
    {{- if $tls }}
    {{- include "prfaas.identity" (dict "root" .root "part" .engine.name "volume" "engine-identity") | nindent 4 }}
    {{- end }}
    # hostMemory of the engine, and what its processes share besides.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ add $mebibytes 2048 }}Mi}
    - name: home
      emptyDir: {}
    {{- include "prfaas.modelVolume" .root | indent 4 }}
{{- end }}
