{{- /* The deployment file of one pool node: (dict "root" $ "host" HOST). Its peers come by [membership]. */ -}}
{{- define "prfaas.poolFile" -}}
{{- $values := .root.Values -}}
{{- $pool := $values.pool -}}
{{- $pd := eq $values.site.role "pd" -}}
# Written by the chart, for {{ .host.name }}.
state = "/var/lib/prfaas"

[model]
name = {{ toJson $values.model.name }}
path = {{ toJson $values.model.path }}

[gateway]
name = {{ $pd | ternary (list $values.gateway.name) (include "prfaas.peerGateways" .root | fromJsonArray) | first | toJson }}

# Required, and read by gateways only.
[routing]
offload_threshold = 0

[security]
identities = "/etc/prfaas/identity"

{{ include "prfaas.membershipTable" .root }}

[clusters.{{ $values.site.name }}]
role = {{ toJson $values.site.role }}
{{- with $values.site.region }}
region = {{ toJson . }}
{{- end }}

[clusters.{{ $values.site.name }}.pools.{{ .host.name }}]
memory = {{ .host.memory | default $pool.memory | toJson }}
listen = "0.0.0.0:{{ $pool.port }}"
admin = "0.0.0.0:{{ $pool.adminPort }}"
socket = "/run/prfaas/pool.sock"
{{- with $pool.disk }}
{{- if .limit }}
disk = "/var/lib/prfaas/blocks"
disk_limit = {{ toJson .limit }}
{{- if .keysSecret }}
disk_keys = "/etc/prfaas/disk-keys/site.keys"
{{- else }}
disk_sealed = false
{{- end }}
{{- end }}
{{- end }}
{{- with $pool.s3 }}
{{- if .bucket }}

[clusters.{{ $values.site.name }}.s3]
bucket = {{ toJson .bucket }}
keys = "/etc/prfaas/site-keys/site.keys"
limit = {{ toJson .limit }}
prefix = {{ .prefix | default $values.site.name | toJson }}
deadline = {{ toJson .deadline }}
object_size = {{ toJson .objectSize }}
{{- with .endpoint }}
endpoint = {{ toJson . }}
{{- end }}
{{- with .region }}
region = {{ toJson . }}
{{- end }}
{{- with .dataRegion }}
data_region = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- with $pool.mooncake }}
{{- if .master }}

[clusters.{{ $values.site.name }}.mooncake]
master = {{ toJson .master }}
keys = "/etc/prfaas/site-keys/site.keys"
prefix = {{ .prefix | default $values.site.name | toJson }}
metadata = {{ toJson .metadata }}
protocol = {{ toJson .protocol }}
devices = {{ toJson .devices }}
replicas = {{ int64 .replicas }}
deadline = {{ toJson .deadline }}
buffer = {{ toJson .buffer }}
{{- with .dataRegion }}
data_region = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- include "prfaas.peerClusters" .root }}
{{- end }}

{{- /* Tables of the other sites, in a deployment file. */ -}}
{{- define "prfaas.peerClusters" -}}
{{- $role := eq .Values.site.role "pd" | ternary "prfaas" "pd" -}}
{{- range .Values.site.peers }}

[clusters.{{ .name }}]
role = {{ toJson $role }}
{{- with .region }}
region = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Names of the gateways of all peers, as JSON. */ -}}
{{- define "prfaas.peerGateways" -}}
{{- $found := list -}}
{{- range .Values.site.peers }}{{ $found = concat $found (.gateways | default list) }}{{ end -}}
{{- toJson $found -}}
{{- end }}

{{- /* Secret with the keys of the tier that pool nodes share; empty without one. */ -}}
{{- define "prfaas.tierKeys" -}}
{{- with .Values.pool -}}
{{- if .s3.bucket }}{{ .s3.keysSecret }}{{ else if .mooncake.master }}{{ .mooncake.keysSecret }}{{ end -}}
{{- end -}}
{{- end }}
