// Package envdpbconnect is the Connect code of envd's two services, generated with the messages of package envdpb.
package envdpbconnect
