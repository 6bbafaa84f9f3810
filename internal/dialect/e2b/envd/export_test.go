package envd

// What the fuzz tests reach for.
var (
	Disposition       = disposition
	Metadata          = metadata
	KeepaliveInterval = keepaliveInterval
	TakeLifetime      = takeLifetime
	Code              = code
	Status            = status
	SignalText        = signalText
)
