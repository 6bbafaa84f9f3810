package tunnel

// ServeFor is Serve with a bound of its own on ports that take nothing.
var ServeFor = serve
