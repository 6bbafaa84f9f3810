package envd

import "net/http"

// exposed are the headers of an answer that a browser's script may read.
const exposed = "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Content-Encoding, Content-Disposition, Content-Length, " +
	"Content-Range, Accept-Ranges, Last-Modified, Location, X-Content-Type-Options, Cache-Control"

// preflight lets browsers of any origin in, and answers the question that they ask beforehand.
func preflight(w http.ResponseWriter, r *http.Request) bool {
	out := w.Header()
	out.Set("Access-Control-Allow-Origin", "*")
	if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
		out.Set("Access-Control-Expose-Headers", exposed)
		return false
	}
	out.Add("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
	out.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
	if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" {
		out.Set("Access-Control-Allow-Headers", asked)
	}
	out.Set("Access-Control-Max-Age", "7200")
	w.WriteHeader(http.StatusNoContent)
	return true
}
