{{- /* Beginning of the names of all objects. Services have no dots and no digit first, names of releases may. */ -}}
{{- define "prfaas.fullname" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "%s-%s" .Chart.Name $name }}{{ end -}}
{{- if contains .Chart.Name $name }}{{ $name }}{{ else }}{{ $name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- /* Labels of every object. The chart's version is left out: a new chart restarts nothing by itself. */ -}}
{{- define "prfaas.labels" -}}
{{ include "prfaas.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "prfaas.selector" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* Name of the objects of a part: (dict "root" $ "part" NAME) */ -}}
{{- define "prfaas.part" -}}
{{- $name := printf "%s-%s" (include "prfaas.fullname" .root) .part -}}
{{- if gt (len $name) 63 }}{{ fail (printf "hosts: %q is %d characters long as the name of a Service, at most 63 are allowed; shorten the part's name or the release's" $name (len $name)) }}{{ end -}}
{{- $name -}}
{{- end }}

{{- define "prfaas.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "prfaas.fullname" .) -}}
{{- end }}

{{- /* Reference of an image: (dict "root" $ "image" of a host, or empty) */ -}}
{{- define "prfaas.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.image | default dict) -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}
{{- else }}{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{- /* Bytes of a size such as 256GiB. */ -}}
{{- define "prfaas.bytes" -}}
{{- $units := dict "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $unit := regexFind "[MGT]iB$" . -}}
{{- mul (int64 (trimSuffix $unit .)) (get $units $unit) -}}
{{- end }}

{{- /* Address inside the cluster: (dict "root" $ "part" NAME "port" PORT) */ -}}
{{- define "prfaas.address" -}}
{{ include "prfaas.part" . }}.{{ .root.Release.Namespace }}.svc:{{ .port }}
{{- end }}

{{- /* True, or empty: engines answer over TLS and ask for a certificate. */ -}}
{{- define "prfaas.engineTls" -}}
{{- if and (eq .Values.site.role "prfaas") (eq .Values.engines.server "vllm") }}true{{ end -}}
{{- end }}
{{- define "prfaas.kvEvents" -}}
{{- if and (eq .Values.site.role "pd") .Values.engines.kvEvents }}true{{ end -}}
{{- end }}

{{- define "prfaas.authorities" -}}
{{- with .Values.site.ca }}{{ . | trim }}{{ "\n" }}{{ end -}}
{{- range .Values.site.peers }}{{ with .ca }}{{ . | trim }}{{ "\n" }}{{ end }}{{ end -}}
{{- end }}

{{- /* Authorities of peers, as JSON, by file: NAME.ca.pem for each part and each host of an engine. */ -}}
{{- define "prfaas.peerAuthorities" -}}
{{- $values := .Values -}}
{{- $found := dict -}}
{{- range $peer := $values.site.peers -}}
  {{- if and $peer.ca (ne (trim $peer.ca) (trim $values.site.ca)) -}}
    {{- $names := $peer.gateways | default list -}}
    {{- range $peer.pools }}{{ $names = append $names .name }}{{ end -}}
    {{- range $peer.engines -}}
      {{- $url := .url | default (printf "https://%s.%s:8100" .name $peer.address) -}}
      {{- $names = append $names (urlParse $url).hostname -}}
    {{- end -}}
    {{- range $names }}{{ $_ := set $found (printf "%s.ca.pem" .) (trim $peer.ca) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{- /* Regions in the certificate of a part, as JSON: (dict "root" $ "part" NAME) */ -}}
{{- define "prfaas.regionsOf" -}}
{{- $values := .root.Values -}}
{{- $found := list -}}
{{- if $values.site.region -}}
  {{- $found = list $values.site.region -}}
  {{- if and (eq $values.site.role "pd") (eq .part $values.gateway.name) -}}
    {{- range $values.site.peers }}{{ $found = append $found .region }}{{ end -}}
    {{- $found = $values.gateway.regions | default (uniq $found) -}}
  {{- else -}}
    {{- $engines := list -}}
    {{- range $values.hosts }}{{ range .engines }}{{ $engines = append $engines .name }}{{ end }}{{ end -}}
    {{- if has .part $engines }}{{ $found = list }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}
