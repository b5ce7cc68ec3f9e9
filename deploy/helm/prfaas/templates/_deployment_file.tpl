{{- /* The deployment file that gateways read; JSON's strings are TOML's. */ -}}
{{- define "prfaas.deploymentFile" -}}
{{- $values := .Values -}}
# Written by the chart; gateway.settings takes precedence (settings.toml).
state = "/var/lib/prfaas"

[model]
name = {{ toJson $values.model.name }}
path = {{ toJson $values.model.path }}

[gateway]
name = {{ toJson $values.gateway.name }}
listen = "0.0.0.0:{{ $values.gateway.port }}"
lame_duck = "{{ int64 $values.gateway.lameDuckSeconds }}s"
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

{{ include "prfaas.membershipTable" . }}

[clusters.{{ $values.site.name }}]
role = "pd"
{{- with $values.site.region }}
region = {{ toJson . }}
{{- end }}
{{- if include "prfaas.hasRoles" . }}
has_roles = true
{{- end }}
{{- include "prfaas.peerClusters" . }}
{{- end }}

{{- /* Sources of members, in the deployment files of gateways and pool nodes. */ -}}
{{- define "prfaas.membershipTable" -}}
[membership]
{{- if and (eq .Values.site.role "pd") (not (include "prfaas.endpointSlices" .)) }}
# Files describe this site's own engines, which its NetworkPolicies fence.
identity = "none"
{{- end }}
folder = "/etc/prfaas/members"
{{- if include "prfaas.endpointSlices" . }}

[membership.kubernetes]
selector = {{ include "prfaas.followed" . | toJson }}
service_account = "/etc/prfaas/api"
{{- end }}
{{- end }}
