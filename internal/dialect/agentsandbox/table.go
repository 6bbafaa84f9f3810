package agentsandbox

import (
	"mime"
	"net/http"
	"strings"
	"time"
)

// column is one of a table that kubectl prints.
type column struct {
	name, kind string
	value      func(*object) any
}

var (
	readyColumn  = column{"Ready", "string", func(o *object) any { return text(o.condition("Ready"), "status") }}
	reasonColumn = column{"Reason", "string", func(o *object) any { return text(o.condition("Ready"), "reason") }}
	ageColumn    = column{"Age", "date", func(o *object) any { return age(o.created()) }}
)

// age is for how long something has been there, as kubectl writes it.
func age(since time.Time) string {
	if since.IsZero() {
		return "<unknown>"
	}
	d := max(time.Since(since), 0)
	switch {
	case d < 2*time.Minute:
		return itoa(d/time.Second) + "s"
	case d < 3*time.Hour:
		return itoa(d/time.Minute) + "m"
	case d < 48*time.Hour:
		return itoa(d/time.Hour) + "h"
	}
	return itoa(d/(24*time.Hour)) + "d"
}

func itoa(d time.Duration) string { return formatVersion(uint64(d)) }

// format is how an answer is to look.
type format int

const (
	formatWhole format = iota
	formatTable
	formatMetadata
)

// maxAccept bounds how many media types of a request are looked at.
const maxAccept = 20

// accepted is the first form of those that a client takes which we have.
func accepted(r *http.Request) (format, error) {
	header := strings.Join(r.Header.Values("Accept"), ",")
	if strings.TrimSpace(header) == "" {
		return formatWhole, nil
	}
	for i, part := range strings.Split(header, ",") {
		media, params, err := mime.ParseMediaType(strings.TrimSpace(part))
		if err != nil || i >= maxAccept {
			continue
		}
		if media != typeJSON && media != "application/*" && media != "*/*" {
			continue
		}
		switch as := params["as"]; {
		case as == "":
			return formatWhole, nil
		case as == "Table" && params["v"] == "v1":
			return formatTable, nil
		case strings.HasPrefix(as, "PartialObjectMetadata") && params["v"] == "v1":
			return formatMetadata, nil
		}
	}
	return 0, refuse(http.StatusNotAcceptable, reasonAccept, "only the following media types are accepted: %s", typeJSON)
}

// table is a list as kubectl prints it. Without columns it goes on with one that was sent before.
func table(rows []fields, columns []column, rv, next string) fields {
	f := fields{"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": listMeta(rv, next), "columnDefinitions": []any{}, "rows": rows}
	if columns == nil {
		return f
	}
	definitions := []any{fields{"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}}
	for _, c := range columns {
		definitions = append(definitions, fields{"name": c.name, "type": c.kind, "format": "", "description": "", "priority": 0})
	}
	f["columnDefinitions"] = definitions
	return f
}

// row is an object as a line of a table; how much of it comes along is the client's choice.
func row(o *object, view fields, include string) fields {
	cells := []any{o.name()}
	for _, c := range o.kind.columns {
		cells = append(cells, c.value(o))
	}
	f := fields{"cells": cells}
	switch include {
	case "Object":
		f["object"] = view
	case "None":
	default:
		f["object"] = partial(view)
	}
	return f
}

// partial is an object without what it says.
func partial(view fields) fields {
	return fields{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": view["metadata"]}
}

func listMeta(rv, next string) fields {
	f := fields{"resourceVersion": rv}
	if next != "" {
		f["continue"] = next
	}
	return f
}
