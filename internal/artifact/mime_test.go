package artifact_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTypes(t *testing.T) {
	w := newWorld(t, defaults)
	files := map[string]struct{ content, want string }{
		"plot.png":       {"\x89PNG\r\n\x1a\n....", "image/png"},
		"plot.txt":       {"\x89PNG\r\n\x1a\n....", "image/png"}, // content wins over a name
		"photo.jpg":      {"\xff\xd8\xff\xe0....", "image/jpeg"},
		"anim":           {"GIF89a....", "image/gif"},
		"pic.webp":       {"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"},
		"report.pdf":     {"%PDF-1.7", "application/pdf"},
		"table.parquet":  {"PAR1\x15\x04PAR1", "application/vnd.apache.parquet"},
		"data":           {"SQLite format 3\x00", "application/vnd.sqlite3"},
		"book.xlsx":      {"PK\x03\x04....", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"},
		"files.zip":      {"PK\x03\x04....", "application/zip"},
		"renamed.csv":    {"PK\x03\x04....", "application/zip"},
		"logs.gz":        {"\x1f\x8b\x08", "application/gzip"},
		"data.csv":       {"a,b\n1,2\n", "text/csv"},
		"data.json":      {`{"a": 1}`, "application/json"},
		"empty.csv":      {"", "text/csv"},
		"empty":          {"", "application/octet-stream"},
		"notes":          {"just words – with a dash", "text/plain"},
		"page":           {"\n<!DOCTYPE html><html>", "text/html"},
		"figure.svg":     {"<?xml version=\"1.0\"?><svg/>", "image/svg+xml"},
		"figure":         {"<svg xmlns=\"…\"/>", "image/svg+xml"},
		"model.pkl":      {"\x80\x04\x95\x00", "application/x-pickle"},
		"noise":          {"\x00\x01\x02\x03", "application/octet-stream"},
		"lies.csv":       {"\x00\x01\x02\x03", "application/octet-stream"}, // no text, whatever it says
		"Upper.CSV":      {"1\n", "text/csv"},
		"sheet.tsv":      {"a\tb\n", "text/tab-separated-values"},
		"notebook.ipynb": {"{}", "application/x-ipynb+json"},
	}
	want, got := map[string]string{}, map[string]string{}
	for name, f := range files {
		w.put(name, f.content)
		want[name] = f.want
	}
	for _, a := range w.collect("run1") {
		got[a.Name] = a.MIME
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
