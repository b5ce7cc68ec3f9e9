{{- /* The deployment file that gateways read; JSON's strings are TOML's. */ -}}
{{- define "prfaas.deploymentFile" -}}
{{- $root := . -}}
{{- $values := .Values -}}
# Written by the chart; gateway.settings takes precedence (settings.toml).
state = "/var/lib/prfaas"

[model]
name = {{ toJson $values.model.name }}
path = {{ toJson $values.model.path }}

[gateway]
name = {{ toJson $values.gateway.name }}
listen = "0.0.0.0:{{ $values.gateway.port }}"
drain_timeout = "{{ int64 $values.gateway.drainSeconds }}s"
{{- with $values.gateway.operatorKey.hashes }}
operator_keys = {{ toJson . }}
{{- end }}
{{- if $values.gateway.tls.existingSecret }}

[gateway.tls]
certificate = "/etc/prfaas/tls/tls.crt"
key = "/etc/prfaas/tls/tls.key"
{{- end }}

[routing]
offload_threshold = {{ int64 $values.routing.offloadThreshold }}

[security]
identities = "/etc/prfaas/identity"

[clusters.{{ $values.site.name }}]
role = "pd"
{{- range $host := $values.hosts }}

[clusters.{{ $values.site.name }}.pools.{{ $host.name }}]
address = {{ include "prfaas.address" (dict "root" $root "part" $host.name "port" $values.pool.port) | toJson }}
{{- range $host.engines }}

[clusters.{{ $values.site.name }}.engines.{{ .name }}]
pool = {{ toJson $host.name }}
role = {{ .role | default "both" | toJson }}
url = {{ include "prfaas.address" (dict "root" $root "part" .name "port" $values.engines.port) | printf "http://%s" | toJson }}
{{- if include "prfaas.kvEvents" $root }}
kv_events = {{ include "prfaas.address" (dict "root" $root "part" .name "port" 5557) | printf "tcp://%s" | toJson }}
kv_events_replay = {{ include "prfaas.address" (dict "root" $root "part" .name "port" 5558) | printf "tcp://%s" | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{- range $peer := $values.site.peers }}

[clusters.{{ $peer.name }}]
role = "prfaas"
{{- range $peer.pools }}

[clusters.{{ $peer.name }}.pools.{{ .name }}]
address = {{ .address | default (printf "%s.%s:7100" .name $peer.address) | toJson }}
{{- end }}
{{- range $peer.engines }}

[clusters.{{ $peer.name }}.engines.{{ .name }}]
pool = {{ toJson .pool }}
url = {{ .url | default (printf "https://%s.%s:8100" .name $peer.address) | toJson }}
{{- end }}
{{- end }}
{{- end }}
