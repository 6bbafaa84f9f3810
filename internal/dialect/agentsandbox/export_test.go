package agentsandbox

// DecodeClaim is decodeObject and check of a claim.
func DecodeClaim(body []byte) error {
	o, err := decodeObject(body, claimKind, beta, "default", "")
	if err != nil {
		return err
	}
	return check(o)
}

// Patch is a patch of an object.
func Patch(object, patch []byte, media string) (map[string]any, error) {
	f, err := decodeFields(object)
	if err != nil {
		return nil, err
	}
	return applyPatch(f, patch, media)
}

// DecodeReview is what a review in protobuf asks.
func DecodeReview(body []byte) error {
	_, err := decodeReview(body)
	return err
}
