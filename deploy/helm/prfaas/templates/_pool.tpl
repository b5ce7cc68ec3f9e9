{{- /* Command line of a pool node: (dict "root" $ "host" HOST) */ -}}
{{- define "prfaas.pool.args" -}}
{{- $values := .root.Values -}}
- /etc/prfaas/pool/deployment.toml
- --name={{ .host.name }}
{{- if eq $values.site.role "pd" }}
- --gateway={{ $values.gateway.name }}
{{- end }}
{{- range include "prfaas.peerGateways" .root | fromJsonArray }}
- --gateway={{ . }}
{{- end }}
- --log-format={{ $values.logFormat }}
{{- range $values.pool.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Container of a pool node: (dict "root" $ "host" HOST "sidecar" BOOL) */ -}}
{{- define "prfaas.pool.container" -}}
{{- $values := .root.Values -}}
{{- $mebibytes := div (int64 (include "prfaas.bytes" (.host.memory | default $values.pool.memory))) 1048576 -}}
{{- if $values.pool.mooncake.master }}
  {{- $mebibytes = add $mebibytes (div (int64 (include "prfaas.bytes" $values.pool.mooncake.buffer)) 1048576) -}}
{{- else if $values.pool.s3.bucket }}
  {{- /* Objects that are being written. */ -}}
  {{- $mebibytes = add $mebibytes (mul 4 (div (int64 (include "prfaas.bytes" $values.pool.s3.objectSize)) 1048576)) -}}
{{- end -}}
name: pool
image: {{ include "prfaas.image" (dict "root" .root "image" .host.image) | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- if .sidecar }}
restartPolicy: Always
{{- end }}
command: [prfaas, pool]
args:
  {{- include "prfaas.pool.args" . | nindent 2 }}
env:
  # Compiled kernels of the codecs, which numba keeps on disk; the program's own folder is read-only.
  - {name: NUMBA_CACHE_DIR, value: /tmp/numba}
{{- with $values.pool.s3.credentialsSecret }}
envFrom:
  - secretRef: {name: {{ quote . }}}
{{- end }}
ports:
  - name: links
    containerPort: {{ $values.pool.port }}
    {{- if $values.pool.hostPort }}
    hostPort: {{ $values.pool.port }}
    {{- end }}
  - {name: admin, containerPort: {{ $values.pool.adminPort }}}
startupProbe:
  httpGet: {path: /live, port: admin}
  periodSeconds: 2
  failureThreshold: 150
livenessProbe:
  httpGet: {path: /live, port: admin}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 2
  failureThreshold: 2
resources:
  # The blocks, and what the process itself takes.
  requests: {cpu: {{ $values.pool.cpu | quote }}, memory: {{ add $mebibytes 1024 }}Mi}
  limits: {memory: {{ add $mebibytes 1024 (max 1024 (div $mebibytes 16)) }}Mi}
{{ include "prfaas.confined" (dict "readOnly" true) }}
volumeMounts:
  - {name: socket, mountPath: /run/prfaas}
  {{- include "prfaas.identityMount" "identity" | nindent 2 }}
  - {name: tmp, mountPath: /tmp}
  - {name: deployment, mountPath: /etc/prfaas/pool, readOnly: true}
  {{- include "prfaas.memberMounts" .root | nindent 2 }}
  {{- with $values.pool.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $values.pool.disk.limit }}
  - {name: blocks, mountPath: /var/lib/prfaas/blocks}
  {{- end }}
  {{- if and $values.pool.disk.limit $values.pool.disk.keysSecret }}
  - {name: disk-keys, mountPath: /etc/prfaas/disk-keys, readOnly: true}
  {{- end }}
  {{- if include "prfaas.tierKeys" .root }}
  - {name: site-keys, mountPath: /etc/prfaas/site-keys, readOnly: true}
  {{- end }}
{{- end }}

{{- /* Annotations of a pod with a pool node, which reads its settings and the names of the sites when it starts. */ -}}
{{- define "prfaas.pool.annotations" -}}
annotations:
  checksum/deployment: {{ include "prfaas.poolFile" . | sha256sum }}
{{- end }}

{{- /* Volumes of a pool node, but for the socket's. */ -}}
{{- define "prfaas.pool.volumes" -}}
{{- $values := .root.Values -}}
{{ include "prfaas.identity" (dict "root" .root "part" .host.name "volume" "identity") }}
- name: tmp
  emptyDir: {}
- name: deployment
  configMap:
    name: {{ include "prfaas.fullname" .root }}-pools
    items: [{key: {{ .host.name }}.toml, path: deployment.toml}]
{{ include "prfaas.memberVolumes" .root }}
{{- with $values.pool.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- if $values.pool.disk.limit }}
- name: blocks
  hostPath: {path: {{ printf "%s/%s" $values.pool.disk.hostPath .host.name | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- if and $values.pool.disk.limit $values.pool.disk.keysSecret }}
- name: disk-keys
  secret:
    secretName: {{ quote $values.pool.disk.keysSecret }}
    defaultMode: 0400
    items: [{key: site.keys, path: site.keys}]
{{- end }}
{{- with include "prfaas.tierKeys" .root }}
- name: site-keys
  secret:
    secretName: {{ quote . }}
    defaultMode: 0400
    items: [{key: site.keys, path: site.keys}]
{{- end }}
{{- end }}

{{- /* A folder of the node is made by the kubelet as root's; this hands it to the pod's user. */ -}}
{{- define "prfaas.pool.folders" -}}
{{- $values := .root.Values -}}
{{- $user := int64 $values.podSecurity.user -}}
- name: folders
  image: {{ include "prfaas.image" (dict "root" .root "image" .host.image) | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  command: [install, -d, "--mode=0700", "--owner={{ $user }}", "--group={{ $user }}"]
  args: [{{ if not .sidecar }}/run/prfaas{{ if $values.pool.disk.limit }}, {{ end }}{{ end }}{{ if $values.pool.disk.limit }}/var/lib/prfaas/blocks{{ end }}]
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN, FOWNER]}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    {{- if not .sidecar }}
    - {name: socket, mountPath: /run/prfaas}
    {{- end }}
    {{- if $values.pool.disk.limit }}
    - {name: blocks, mountPath: /var/lib/prfaas/blocks}
    {{- end }}
{{- end }}
