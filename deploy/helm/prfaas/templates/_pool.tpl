{{- /* Command line of a pool node: (dict "root" $ "host" HOST) */ -}}
{{- define "prfaas.pool.args" -}}
{{- $values := .root.Values -}}
- --name={{ .host.name }}
- --listen=0.0.0.0:{{ $values.pool.port }}
- --admin=0.0.0.0:{{ $values.pool.adminPort }}
- --memory={{ .host.memory | default $values.pool.memory }}
{{- if $values.pool.disk.limit }}
- --disk=/var/lib/prfaas/blocks
- --disk-limit={{ $values.pool.disk.limit }}
{{- end }}
{{- with $values.pool.s3 }}
{{- if .bucket }}
- --s3-bucket={{ .bucket }}
- --s3-keys=/etc/prfaas/site-keys/site.keys
- --s3-limit={{ .limit }}
- --s3-prefix={{ .prefix | default $values.site.name }}
{{- with .endpoint }}
- --s3-endpoint={{ . }}
{{- end }}
{{- with .region }}
- --s3-region={{ . }}
{{- end }}
{{- end }}
{{- end }}
- --socket=/run/prfaas/pool.sock
- --identities=/etc/prfaas/identity
{{- if eq $values.site.role "pd" }}
- --gateway={{ $values.gateway.name }}
{{- end }}
{{- range $values.site.peers }}
{{- range .gateways }}
- --gateway={{ . }}
{{- end }}
{{- end }}
- --peers-from=/etc/prfaas/peers/peers.toml
- --log-format={{ $values.logFormat }}
{{- range $values.pool.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Container of a pool node: (dict "root" $ "host" HOST "sidecar" BOOL) */ -}}
{{- define "prfaas.pool.container" -}}
{{- $values := .root.Values -}}
{{- $mebibytes := div (int64 (include "prfaas.bytes" (.host.memory | default $values.pool.memory))) 1048576 -}}
name: pool
image: {{ include "prfaas.image" (dict "root" .root "image" .host.image) }}
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
  - secretRef: {name: {{ . }}}
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
  - {name: peers, mountPath: /etc/prfaas/peers, readOnly: true}
  {{- include "prfaas.memberMounts" .root | nindent 2 }}
  {{- if $values.pool.disk.limit }}
  - {name: blocks, mountPath: /var/lib/prfaas/blocks}
  {{- end }}
  {{- if $values.pool.s3.bucket }}
  - {name: site-keys, mountPath: /etc/prfaas/site-keys, readOnly: true}
  {{- end }}
{{- end }}

{{- /* Annotations of a pod with a pool node: it reads peers.toml, the names of the sites, when it starts. */ -}}
{{- define "prfaas.pool.annotations" -}}
annotations:
  checksum/peers: {{ include "prfaas.peersFile" . | sha256sum }}
{{- end }}

{{- /* Volumes of a pool node, but for the socket's. */ -}}
{{- define "prfaas.pool.volumes" -}}
{{- $values := .root.Values -}}
{{ include "prfaas.identity" (dict "root" .root "part" .host.name "volume" "identity") }}
- name: tmp
  emptyDir: {}
- name: peers
  configMap: {name: {{ include "prfaas.fullname" .root }}-peers}
{{ include "prfaas.memberVolumes" .root }}
{{- if $values.pool.disk.limit }}
- name: blocks
  hostPath: {path: {{ $values.pool.disk.hostPath }}/{{ .host.name }}, type: DirectoryOrCreate}
{{- end }}
{{- with $values.pool.s3 }}
{{- if .bucket }}
- name: site-keys
  secret: {secretName: {{ .keysSecret }}, defaultMode: 0400}
{{- end }}
{{- end }}
{{- end }}

{{- /* A folder of the node is made by the kubelet as root's; this hands it to the pod's user. */ -}}
{{- define "prfaas.pool.folders" -}}
{{- $values := .root.Values -}}
{{- $user := int64 $values.podSecurity.user -}}
- name: folders
  image: {{ include "prfaas.image" (dict "root" .root "image" .host.image) }}
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
