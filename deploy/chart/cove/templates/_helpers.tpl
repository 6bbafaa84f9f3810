{{- define "cove.name" -}}
{{- if contains "cove" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-cove" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "cove.labels" -}}
{{ include "cove.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "cove.selector" -}}
app.kubernetes.io/name: cove
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cove.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "cove.name" .) }}{{ else }}{{ required "serviceAccount.name is needed where the chart does not create one" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "cove.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The most servers that there may be at once. */ -}}
{{- define "cove.servers" -}}
{{- if .Values.autoscaling.enabled }}{{ max (int .Values.replicas) (int .Values.autoscaling.maxReplicas) }}{{ else }}{{ int .Values.replicas }}{{ end }}
{{- end }}

{{- /* Refused here, and by the server too: two of them would write one file. */ -}}
{{- define "cove.check" -}}
{{- $most := include "cove.servers" . | int }}
{{- if and (gt $most 1) (not .Values.database.existingSecret) }}
{{- fail (printf "%d servers cannot share a SQLite file: name a Secret with the URL of a Postgres in database.existingSecret, or set replicas to 1" $most) }}
{{- end }}
{{- if eq .Values.sandboxes.namespace .Release.Namespace }}
{{- fail "sandboxes.namespace must not be the release's: the server's rights over Pods would reach the server's own" }}
{{- end }}
{{- end }}
