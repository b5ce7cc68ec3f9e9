{{- /* Completes .Values and gives each value the type that its place in an object has. Every template begins with it.
     A key that was set to null has its default. Helm reads whole numbers as floats, which would be rendered as
     1.00066e+09, and Kubernetes accepts only strings in some places, where people also write numbers and booleans. */ -}}
{{- define "prfaas.values" -}}
{{- include "prfaas.fill" (dict "into" .Values "from" (.Files.Get "files/values.yaml" | fromYaml)) -}}
{{- include "prfaas.typed" .Values -}}
{{- end }}

{{- define "prfaas.fill" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
  {{- if not (hasKey $into $key) }}{{ $_ := set $into $key $value -}}
  {{- else if kindIs "map" $value }}{{ include "prfaas.fill" (dict "into" (get $into $key) "from" $value) }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "prfaas.typed" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
  {{- if and (kindIs "float64" $value) (eq (float64 (int64 $value)) $value) }}{{ $value = int64 $value }}{{ $_ := set $map $key $value }}{{ end -}}
  {{- if kindIs "map" $value -}}
    {{- include "prfaas.typed" $value -}}
    {{- if has $key (list "annotations" "labels" "matchLabels" "nodeSelector" "volumeAttributes") -}}
      {{- range $name, $each := $value }}{{ $_ := set $value $name (toString $each) }}{{ end -}}
    {{- end -}}
  {{- else if kindIs "slice" $value -}}
    {{- $list := list -}}
    {{- range $each := $value -}}
      {{- if kindIs "map" $each }}{{ include "prfaas.typed" $each }}
      {{- else if and (kindIs "float64" $each) (eq (float64 (int64 $each)) $each) }}{{ $each = int64 $each }}{{ end -}}
      {{- if has $key (list "args" "values") }}{{ $each = toString $each }}{{ end -}}
      {{- $list = append $list $each -}}
    {{- end -}}
    {{- $_ := set $map $key $list -}}
  {{- else if and (eq $key "value") (ne (kindOf $value) "invalid") }}{{ $_ := set $map $key (toString $value) }}{{ end -}}
{{- end -}}
{{- end }}
