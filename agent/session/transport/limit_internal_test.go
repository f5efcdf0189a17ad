package transport

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// response returns what a server sends: its settings, then a response with these fields.
func response(t *testing.T, padding uint8, fields ...string) []byte {
	t.Helper()
	var block, out bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for i := 0; i < len(fields); i += 2 {
		if err := encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}); err != nil {
			t.Fatal(err)
		}
	}
	framer := http2.NewFramer(&out, nil)
	if err := framer.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, PadLength: padding,
	}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestRetryAfterOfTheFirstResponse(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fields []string
		want   time.Duration
	}{
		{"a limit", []string{":status", "429", "retry-after", "90"}, 90 * time.Second},
		{"overloaded", []string{":status", "503", "content-type", "text/html", "retry-after", "7"}, 7 * time.Second},
		{"too long", []string{":status", "429", "retry-after", "999999"}, mostRetryAfter},
		{"a date", []string{":status", "429", "retry-after", "Fri, 27 Nov 2026 01:00:00 GMT"}, 0},
		{"none", []string{":status", "429"}, 0},
		{"a page", []string{":status", "200", "retry-after", "90"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, padding := range []uint8{0, 9} {
				sent := response(t, padding, tt.fields...)
				for _, piece := range []int{1, 7, len(sent)} {
					var l limitReader
					var got time.Duration
					for at := 0; at < len(sent); at += piece {
						got = max(got, l.read(sent[at:min(at+piece, len(sent))]))
					}
					if got != tt.want || !l.done {
						t.Errorf("in pieces of %d, padding %d: %s, done %t", piece, padding, got, l.done)
					}
				}
			}
		})
	}
	var l limitReader
	if got := l.read(make([]byte, mostRead+1)); got != 0 || !l.done || l.kept != nil {
		t.Error("what has no headers is kept")
	}
}

func FuzzLimitReader(f *testing.F) {
	f.Add([]byte("\x00\x00\x01\x01\x2c\x00\x00\x00\x01\xff"))
	f.Fuzz(func(_ *testing.T, b []byte) {
		var l limitReader
		_ = l.read(b)
	})
}
