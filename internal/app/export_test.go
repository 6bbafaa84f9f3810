package app

// DropPrivilege is tested in a process of its own: it cannot be undone.
var DropPrivilege = func() error { return dropPrivilege(nil) }

// ServerUID is who the server of a data directory becomes.
func ServerUID(dataDir string) int { return serverUser(dataDir).uid }

// Bar shows progress.
var Bar = bar

// SandboxConfig maps the configuration onto the domain's.
var SandboxConfig = sandboxConfig

// OwnCertificate is the certificate that a server makes for itself.
var OwnCertificate = ownCertificate
