// Package processpbconnect is the Connect code of sandboxd's service for processes, generated with the messages of package processpb.
package processpbconnect
