package cove

import (
	"encoding/json"
	"iter"
	"maps"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// OpenAPI makes the OpenAPI 3.1 file from the route table and the Go types it names. comments explains types by
// "Type" and fields by "Type.Field"; they are read from the source by the test that keeps the committed file current.
func OpenAPI(comments map[string]string) ([]byte, error) {
	g := generator{comments: comments, schemas: object{}, asked: map[reflect.Type]bool{}}
	for _, r := range routes {
		if _, raw := r.request.(rawBody); r.request != nil && !raw {
			g.asks(reflect.TypeOf(r.request))
		}
	}
	paths, upgrades := object{}, object{}
	for _, r := range routes {
		if r.upgrades() {
			upgrades[r.name] = object{
				"summary":                 "At " + Prefix + r.path,
				"x-path":                  Prefix + r.path,
				strings.ToLower(r.method): g.operation(r),
			}
			continue
		}
		item, _ := paths[Prefix+r.path].(object)
		if item == nil {
			item = object{}
			paths[Prefix+r.path] = item
		}
		item[strings.ToLower(r.method)] = g.operation(r)
	}
	// Control and ExecRequest travel in frames, so no operation leads to them.
	g.schema(reflect.TypeOf(interactiveControl))
	doc := object{
		"openapi": "3.1.0",
		"info":    object{"title": "Cove", "version": "v1", "description": "Isolated sandboxes for AI agents: run code, run commands, move files."},
		"paths":   paths,
		"security": []any{
			object{"apiKey": []any{}}, object{"bearer": []any{}},
		},
		"components": object{
			"schemas": g.schemas,
			// OpenAPI has no words for a connection that changes its protocol: as an operation of paths
			// it would promise an HTTP exchange that the server refuses.
			"pathItems": upgrades,
			"securitySchemes": object{
				"apiKey": object{"type": "apiKey", "in": "header", "name": "X-API-Key"},
				"bearer": object{"type": "http", "scheme": "bearer"},
			},
		},
	}
	b, err := json.MarshalIndent(doc, "", "  ")
	return append(b, '\n'), err
}

type object = map[string]any

type generator struct {
	comments map[string]string
	schemas  object
	asked    map[reflect.Type]bool // types of requests, which hold nothing else
}

// asks collects the types of a request.
func (g *generator) asks(t reflect.Type) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || g.asked[t] || t == reflect.TypeFor[time.Time]() {
		return
	}
	g.asked[t] = true
	for f := range structFields(t) {
		g.asks(f.typ)
	}
}

func (g *generator) operation(r route) object {
	op := object{"operationId": r.name, "summary": r.summary, "tags": []string{r.tag}, "responses": g.responses(r)}
	if r.about != "" {
		op["description"] = r.about
	}
	if r.public {
		op["security"] = []any{}
	}
	if params := parameters(r); len(params) > 0 {
		op["parameters"] = params
	}
	if r.request != nil {
		op["requestBody"] = object{"required": r.required, "content": g.content(r.request)}
	}
	return op
}

func parameters(r route) []any {
	var list []any
	for part := range strings.SplitSeq(r.path, "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			name = strings.TrimSuffix(name, "}")
			schema := object{"type": "string"}
			maps.Copy(schema, paramRule(r, name))
			if strings.HasPrefix(r.path, "/sessions/") {
				schema["pattern"] = identifier
			}
			list = append(list, object{"name": name, "in": "path", "required": true, "schema": schema})
		}
	}
	for i, params := range [][]param{r.query, r.header} {
		for _, p := range params {
			schema := object{"type": p.kind}
			maps.Copy(schema, paramRule(r, p.name))
			if p.repeats {
				schema = object{"type": "array", "items": schema}
			}
			o := object{"name": p.name, "in": [...]string{"query", "header"}[i], "description": p.about, "schema": schema}
			if p.required {
				o["required"] = true
			}
			if strings.HasSuffix(p.name, "*") {
				// A family of parameters is one object whose properties are spelled out in the query.
				o["name"] = "metadata"
				o["schema"] = object{
					"type": "object", "propertyNames": object{"pattern": `^` + regexp.QuoteMeta(strings.TrimSuffix(p.name, "*")) + `.+$`},
					"additionalProperties": object{"type": "string"},
				}
			}
			list = append(list, o)
		}
	}
	return list
}

func (g *generator) responses(r route) object {
	ok := object{"description": "success"}
	content := object{}
	if r.response != nil {
		content = g.content(r.response)
	}
	if r.stream != nil {
		content["application/x-ndjson"] = object{"schema": g.schema(reflect.TypeOf(r.stream))}
	}
	if len(content) > 0 {
		ok["content"] = content
	}
	out := object{
		strconv.Itoa(r.status): ok,
		"default":              object{"description": "failure", "content": g.content(failure)},
	}
	if r.also != 0 {
		out[strconv.Itoa(r.also)] = ok
	}
	return out
}

func (g *generator) content(example any) object {
	if _, raw := example.(rawBody); raw {
		return object{"application/octet-stream": object{"schema": object{"type": "string", "format": "binary"}}}
	}
	return object{"application/json": object{"schema": g.schema(reflect.TypeOf(example))}}
}

// schema describes a type; a struct becomes a component of its own.
func (g *generator) schema(t reflect.Type) object {
	switch t {
	case reflect.TypeFor[time.Time]():
		return object{"type": "string", "format": "date-time"}
	case reflect.TypeFor[json.RawMessage]():
		return object{}
	case reflect.TypeFor[[]byte]():
		return object{"type": "string", "contentEncoding": "base64"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return g.schema(t.Elem())
	case reflect.Struct:
		g.component(t)
		return object{"$ref": "#/components/schemas/" + t.Name()}
	case reflect.Slice:
		return object{"type": "array", "items": g.schema(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": g.schema(t.Elem())}
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Float32, reflect.Float64:
		return object{"type": "number"}
	case reflect.Interface:
		return object{}
	}
	o := object{"type": "integer"}
	if t.Kind() == reflect.Int64 {
		o["format"] = "int64"
	}
	return o
}

func (g *generator) component(t reflect.Type) {
	if _, done := g.schemas[t.Name()]; done {
		return
	}
	properties, required := object{}, []string{}
	o := object{"type": "object", "properties": properties}
	g.schemas[t.Name()] = o // before its fields, which may lead back here
	maps.Copy(o, typeRules[t.Name()])
	if g.asked[t] {
		o["additionalProperties"] = false
	}
	if text := g.comments[t.Name()]; text != "" {
		o["description"] = text
	}
	for f := range structFields(t) {
		s := g.schema(f.typ)
		if text := g.comments[f.owner+"."+f.goName]; text != "" {
			s["description"] = text
		}
		if f.enum != "" {
			s["enum"] = strings.Split(f.enum, ",")
		}
		g.restrict(s, fieldRules[t.Name()+"."+f.name])
		properties[f.name] = s
		if !f.optional {
			required = append(required, f.name)
		}
	}
	if len(required) > 0 {
		o["required"] = required
	}
}

// restrict adds a field's rules to what its type says.
func (g *generator) restrict(s, rule object) {
	for name, value := range rule {
		if inner, ok := s[name].(object); ok { // of the items of a list, the values of a map
			g.restrict(inner, value.(object))
			continue
		}
		s[name] = value
	}
}

// field is a struct field as JSON sees it.
type field struct {
	name, goName, owner, enum string
	typ                       reflect.Type
	optional                  bool
}

// structFields yields the JSON fields of a struct, those of embedded structs in their place.
func structFields(t reflect.Type) iter.Seq[field] {
	return func(yield func(field) bool) {
		for i := range t.NumField() {
			f := t.Field(i)
			tag := f.Tag.Get("json")
			if f.Anonymous && tag == "" {
				for inner := range structFields(f.Type) {
					if !yield(inner) {
						return
					}
				}
				continue
			}
			name, options, _ := strings.Cut(tag, ",")
			if !f.IsExported() || name == "-" || name == "" {
				continue
			}
			optional := strings.Contains(options, "omit") || mayMiss[t.Name()+"."+name]
			if !yield(field{name, f.Name, t.Name(), f.Tag.Get("enum"), f.Type, optional}) {
				return
			}
		}
	}
}
