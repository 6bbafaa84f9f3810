package interpreter

// DecodeExecution reads bytes of a client's.
func DecodeExecution(body []byte) {
	if req, err := decodeExecution(body); err == nil {
		req.env()
		languageOf(req.Language)
	}
}

// Occupy makes a sandbox look as if contexts of it were being made.
func (in *Interpreter) Occupy(id string, n int) (free func()) {
	for range n {
		in.making.begin(id)
	}
	return func() {
		for range n {
			in.making.end(id)
		}
	}
}

// MaxContexts is how many a sandbox may have.
const MaxContexts = maxContexts
