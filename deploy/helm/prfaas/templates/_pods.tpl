{{- /* What every pod has. */ -}}
{{- define "prfaas.pod" -}}
serviceAccountName: {{ include "prfaas.serviceAccount" . | quote }}
automountServiceAccountToken: false
# A Service called "vllm" would set VLLM_PORT in every pod of the namespace.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.podSecurity.user }}
  runAsGroup: {{ .Values.podSecurity.user }}
  # Files of secrets belong to root; this group is how the pod's user reads them.
  fsGroup: {{ .Values.podSecurity.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- end }}

{{- define "prfaas.nodeSelector" -}}
{{- $labels := deepCopy .root.Values.nodeSelector -}}
{{- with .node }}{{ $_ := set $labels "kubernetes.io/hostname" . }}{{ end -}}
{{- with $labels }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "prfaas.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ .readOnly }}
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Volume with the identity of a part: ca.pem, NAME.pem, NAME.key:
     (dict "root" $ "part" NAME "volume" NAME) */ -}}
{{- define "prfaas.identity" -}}
{{- $certificates := .root.Values.certificates -}}
{{- $bundle := include "prfaas.authorities" .root -}}
{{- $managed := eq $certificates.source "cert-manager" -}}
- name: {{ .volume }}
  projected:
    defaultMode: 0400
    sources:
      - secret:
          {{- if $managed }}
          name: {{ include "prfaas.part" . }}-identity
          items:
            - {key: tls.crt, path: {{ .part }}.pem}
            - {key: tls.key, path: {{ .part }}.key}
            {{- if not $bundle }}
            - {key: ca.crt, path: ca.pem}
            {{- end }}
          {{- else }}
          name: {{ quote $certificates.existingSecret }}
          items:
            - {key: {{ .part }}.pem, path: {{ .part }}.pem}
            - {key: {{ .part }}.key, path: {{ .part }}.key}
            {{- if not $bundle }}
            - {key: ca.pem, path: ca.pem}
            {{- end }}
          {{- end }}
      {{- if $bundle }}
      - configMap:
          name: {{ include "prfaas.fullname" .root }}-authorities
          items:
            - {key: ca.pem, path: ca.pem}
            {{- range include "prfaas.peerAuthorities" .root | fromJson | keys }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
{{- end }}

{{- define "prfaas.identityMount" -}}
- {name: {{ . }}, mountPath: /etc/prfaas/identity, readOnly: true}
{{- end }}

{{- /* The checkpoint's volume and its mount, if there is one. */ -}}
{{- define "prfaas.modelVolume" -}}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- define "prfaas.modelMount" -}}
{{- if .Values.model.volume }}
- {name: model, mountPath: {{ quote .Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end }}
