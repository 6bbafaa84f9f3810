// Package processpb is the wire format of sandboxd's service for processes, generated from the .proto file beside it.
package processpb

//go:generate sh generate.sh
