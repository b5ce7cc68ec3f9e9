{{- /* True, or empty: gateways and pool nodes follow the EndpointSlices of this site. */ -}}
{{- define "prfaas.endpointSlices" -}}
{{- if and (eq .Values.site.role "pd") .Values.membership.endpointSlices }}true{{ end -}}
{{- end }}

{{- /* Selector of the EndpointSlices, which have the labels of their Services. */ -}}
{{- define "prfaas.followed" -}}
prfaas/kind,app.kubernetes.io/instance={{ .Release.Name }}
{{- end }}

{{- /* True, or empty: engines prefill or decode, and none does both. */ -}}
{{- define "prfaas.hasRoles" -}}
{{- $roles := list -}}
{{- range .Values.hosts }}{{ range .engines }}{{ $roles = append $roles (.role | default "both") }}{{ end }}{{ end -}}
{{- if and (eq .Values.site.role "pd") (not (has "both" $roles)) }}true{{ end -}}
{{- end }}

{{- /* Files with the members that no EndpointSlice of this site has. */ -}}
{{- define "prfaas.members" -}}
{{- $root := . -}}
{{- $values := .Values -}}
{{- $pd := eq $values.site.role "pd" -}}
{{- if not (include "prfaas.endpointSlices" .) }}
{{- range $host := $values.hosts }}
{{ $host.name }}.toml: |
  kind = "pool"
  cluster = {{ toJson $values.site.name }}
  address = {{ include "prfaas.address" (dict "root" $root "part" $host.name "port" $values.pool.port) | toJson }}
{{- range (ternary $host.engines list $pd) }}
{{ .name }}.toml: |
  kind = "engine"
  cluster = {{ toJson $values.site.name }}
  pool = {{ toJson $host.name }}
  role = {{ .role | default "both" | toJson }}
  url = {{ include "prfaas.address" (dict "root" $root "part" .name "port" $values.engines.port) | printf "http://%s" | toJson }}
  {{- if include "prfaas.kvEvents" $root }}
  kv_events = {{ include "prfaas.address" (dict "root" $root "part" .name "port" 5557) | printf "tcp://%s" | toJson }}
  kv_events_replay = {{ include "prfaas.address" (dict "root" $root "part" .name "port" 5558) | printf "tcp://%s" | toJson }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $peer := $values.site.peers }}
{{- range $peer.pools }}
{{ .name }}.toml: |
  kind = "pool"
  cluster = {{ toJson $peer.name }}
  address = {{ .address | default (printf "%s.%s:7100" .name $peer.address) | toJson }}
  {{- if and .budget (not $pd) }}
  budget = {{ toJson .budget }}
  {{- end }}
  {{- if and .connections (not $pd) }}
  connections = {{ int64 .connections }}
  {{- end }}
{{- end }}
{{- range $peer.engines }}
{{ .name }}.toml: |
  kind = "engine"
  cluster = {{ toJson $peer.name }}
  pool = {{ toJson .pool }}
  url = {{ .url | default (printf "https://%s.%s:8100" .name $peer.address) | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Labels by which a Service's EndpointSlices describe a member: (dict "root" $ "kind" KIND "part" NAME, or "" for the names of the pods, "host" HOST "role" ROLE) */ -}}
{{- define "prfaas.memberLabels" -}}
{{- if include "prfaas.endpointSlices" .root }}
prfaas/kind: {{ .kind }}
prfaas/cluster: {{ quote .root.Values.site.name }}
{{- with .part }}
prfaas/name: {{ quote . }}
{{- end }}
{{- if eq .kind "engine" }}
prfaas/pool: {{ quote .host }}
prfaas/role: {{ .role | default "both" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Number of entries of hosts[].engines[] that are scaled. */ -}}
{{- define "prfaas.engineGroups" -}}
{{- $count := 0 -}}
{{- range .Values.hosts }}{{ range .engines }}{{ if .maxReplicas }}{{ $count = add1 $count }}{{ end }}{{ end }}{{ end -}}
{{- $count -}}
{{- end }}

{{- /* Volumes with the members, and with what the API server asks for. */ -}}
{{- define "prfaas.memberVolumes" -}}
- name: members
  configMap: {name: {{ include "prfaas.fullname" . }}-members}
{{- if include "prfaas.endpointSlices" . }}
# Not mounted automatically: of all containers only those that list members get a token.
- name: api
  projected:
    defaultMode: 0400
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]
{{- end }}
{{- end }}

{{- define "prfaas.memberMounts" -}}
- {name: members, mountPath: /etc/prfaas/members, readOnly: true}
{{- if include "prfaas.endpointSlices" . }}
- {name: api, mountPath: /etc/prfaas/api, readOnly: true}
{{- end }}
{{- end }}
