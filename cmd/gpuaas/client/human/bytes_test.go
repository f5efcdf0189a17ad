package human

import (
	"testing"
)

func TestBytes(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "512": 512, "10Gi": 10 << 30, "1.5Mi": 3 << 19, "2G": 2e9,
		"1Ti": 1 << 40, "3GiB": 3 << 30, "4k": 4000,
	} {
		if got, err := ParseBytes(text); err != nil || got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "ten", "-1", "1Xi", "NaN", "Inf", "9999999Pi", "Gi"} {
		if got, err := ParseBytes(text); err == nil {
			t.Errorf("%q was read as %d", text, got)
		}
	}
	for n, want := range map[int64]string{0: "0", 1023: "1023", 10 << 30: "10Gi", 3 << 29: "1.5Gi"} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
