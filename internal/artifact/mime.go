package artifact

import (
	"bytes"
	"fmt"
	"path"
	"strings"
	"unicode/utf8"
)

// sniffed is how many bytes of a file say what it is.
const sniffed = 512

// unknown is the type of a file that neither its content nor its name explains.
const unknown = "application/octet-stream"

// byContent are beginnings that no other file has. They win over a name: a name is easily wrong.
var byContent = []struct{ magic, mime string }{
	{"\x89PNG\r\n\x1a\n", "image/png"},
	{"\xff\xd8\xff", "image/jpeg"},
	{"GIF87a", "image/gif"},
	{"GIF89a", "image/gif"},
	{"II*\x00", "image/tiff"},
	{"MM\x00*", "image/tiff"},
	{"%PDF-", "application/pdf"},
	{"\x1f\x8b", "application/gzip"},
	{"BZh", "application/x-bzip2"},
	{"\xfd7zXZ\x00", "application/x-xz"},
	{"\x28\xb5\x2f\xfd", "application/zstd"},
	{"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"},
	{"PAR1", "application/vnd.apache.parquet"},
	{"ARROW1", "application/vnd.apache.arrow.file"},
	{"SQLite format 3\x00", "application/vnd.sqlite3"},
	{"\x89HDF\r\n\x1a\n", "application/x-hdf5"},
	{"\x93NUMPY", "application/x-npy"},
	{"OggS", "audio/ogg"},
	{"ID3", "audio/mpeg"},
	{"fLaC", "audio/flac"},
	{"wOFF", "font/woff"},
	{"wOF2", "font/woff2"},
	{"\x1aE\xdf\xa3", "video/webm"},
	{"\x7fELF", "application/x-executable"},
}

// byName is asked for files whose content is text, and for containers: a ZIP may be a spreadsheet.
var byName = map[string]string{
	".txt": "text/plain", ".log": "text/plain", ".md": "text/markdown", ".csv": "text/csv", ".tsv": "text/tab-separated-values",
	".html": "text/html", ".htm": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".xml": "application/xml",
	".json": "application/json", ".jsonl": "application/jsonl", ".ndjson": "application/x-ndjson", ".geojson": "application/geo+json",
	".ipynb": "application/x-ipynb+json", ".yaml": "application/yaml", ".yml": "application/yaml", ".toml": "application/toml",
	".svg": "image/svg+xml", ".py": "text/x-python", ".sql": "application/sql", ".sh": "application/x-sh", ".tex": "application/x-tex",
}

// byBinaryName is asked for files that are no text and have no beginning of their own.
var byBinaryName = map[string]string{
	".pkl": "application/x-pickle", ".pickle": "application/x-pickle", ".tar": "application/x-tar", ".feather": "application/vnd.apache.arrow.file",
	".mp3": "audio/mpeg", ".bmp": "image/bmp", ".ico": "image/vnd.microsoft.icon", ".wasm": "application/wasm", ".onnx": "application/x-onnx",
	".xls": "application/vnd.ms-excel", ".doc": "application/msword", ".safetensors": "application/x-safetensors", ".pt": "application/x-pytorch",
}

// inZIP are formats that are ZIP files inside.
var inZIP = map[string]string{
	".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
	".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
	".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
	".ods":  "application/vnd.oasis.opendocument.spreadsheet", ".odt": "application/vnd.oasis.opendocument.text",
	".epub": "application/epub+zip", ".jar": "application/java-archive", ".whl": "application/zip", ".npz": "application/x-npz", ".pt": "application/x-pytorch",
}

// sniff says what a file is by its first bytes and its name.
func sniff(name string, head []byte) string {
	ext := strings.ToLower(path.Ext(name))
	for _, c := range byContent {
		if bytes.HasPrefix(head, []byte(c.magic)) {
			return c.mime
		}
	}
	switch {
	case bytes.HasPrefix(head, []byte("PK\x03\x04")), bytes.HasPrefix(head, []byte("PK\x05\x06")):
		return either(inZIP[ext], "application/zip")
	case len(head) >= 12 && string(head[:4]) == "RIFF":
		return riff(string(head[8:12]))
	case len(head) >= 12 && string(head[4:8]) == "ftyp":
		return "video/mp4"
	case isText(head):
		return textual(ext, head)
	}
	return either(byBinaryName[ext], unknown)
}

func either(mime, otherwise string) string {
	if mime == "" {
		return otherwise
	}
	return mime
}

func riff(kind string) string {
	switch kind {
	case "WEBP":
		return "image/webp"
	case "WAVE":
		return "audio/wav"
	case "AVI ":
		return "video/x-msvideo"
	}
	return unknown
}

// textual is the type of a text: by its name, else by how it begins.
func textual(ext string, head []byte) string {
	if mime, ok := byName[ext]; ok {
		return mime
	}
	if len(head) == 0 {
		return either(byBinaryName[ext], unknown)
	}
	start := bytes.ToLower(bytes.TrimLeft(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf")), " \t\r\n"))
	switch {
	case bytes.HasPrefix(start, []byte("<!doctype html")), bytes.HasPrefix(start, []byte("<html")):
		return "text/html"
	case bytes.HasPrefix(start, []byte("<svg")):
		return "image/svg+xml"
	case bytes.HasPrefix(start, []byte("<?xml")):
		return "application/xml"
	}
	return "text/plain"
}

// isText says whether bytes are UTF-8 without control characters; the last character may be cut.
func isText(head []byte) bool {
	for len(head) > 0 {
		r, n := utf8.DecodeRune(head)
		if r == utf8.RuneError && n == 1 {
			return !utf8.FullRune(head)
		}
		if r < ' ' && r != '\t' && r != '\n' && r != '\r' && r != '\f' && r != '\x1b' {
			return false
		}
		head = head[n:]
	}
	return true
}

// human is a size as people say it.
func human(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d bytes", n)
}
