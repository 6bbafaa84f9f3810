package interpreter

// DecodeExecution reads bytes of a client's.
func DecodeExecution(body []byte) {
	if req, err := decodeExecution(body); err == nil {
		req.env()
		languageOf(req.Language)
	}
}
