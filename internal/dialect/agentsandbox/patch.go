package agentsandbox

import (
	"errors"
	"net/http"

	"github.com/covehq/cove/internal/dialect/agentsandbox/patch"
)

// applyPatch is an object after a patch, which may not become larger or deeper than one that is posted.
func applyPatch(view fields, body []byte, media string) (fields, error) {
	f, err := patched(deepFields(view), body, media)
	if err != nil {
		return nil, err
	}
	if err := checkDepth(f); err != nil {
		return nil, err
	}
	if len(encode(f)) > maxBody {
		return nil, tooLarge()
	}
	return f, nil
}

func patched(view fields, body []byte, media string) (fields, error) {
	if media == typeMergePatch {
		p, err := decodeFields(body)
		if err != nil {
			return nil, err
		}
		return patch.Merge(view, p), nil
	}
	v, err := patch.Apply(view, body, maxBody)
	var failed *patch.OperationError
	switch {
	case errors.As(err, &failed):
		return nil, refuse(http.StatusUnprocessableEntity, reasonInvalid, "the server rejected our request due to an error in our request: %s", failed)
	case errors.Is(err, patch.ErrTooLarge):
		return nil, tooLarge()
	case err != nil:
		return nil, err
	}
	f, ok := v.(fields)
	if !ok {
		return nil, badRequest("the patch leaves no object")
	}
	return f, nil
}
