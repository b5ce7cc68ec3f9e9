{{- define "prfaas.from.monitoring" -}}
{{- with .Values.networkPolicy.monitoring }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "prfaas.from.gateway" -}}
- podSelector:
    matchLabels:
      {{- include "prfaas.selector" . | nindent 6 }}
      app.kubernetes.io/component: gateway
{{- end }}

{{- define "prfaas.from.pools" -}}
- podSelector:
    matchLabels:
      {{- include "prfaas.selector" . | nindent 6 }}
    matchExpressions:
      - {key: prfaas/pool, operator: Exists}
{{- end }}

{{- define "prfaas.from.peers" -}}
{{- range .Values.site.peers }}
{{- range .cidrs }}
- ipBlock: {cidr: {{ quote . }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "prfaas.from.test" -}}
- podSelector:
    matchLabels:
      {{- include "prfaas.selector" . | nindent 6 }}
      app.kubernetes.io/component: test
{{- end }}
