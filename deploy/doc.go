// Package deploy holds what brings Cove onto other machines: an image, a Helm chart, plain manifests, dashboards. Its tests read
// them with the eyes of those who will.
package deploy
