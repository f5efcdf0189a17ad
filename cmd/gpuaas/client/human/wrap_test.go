package human

import "testing"

func TestWrapText(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"one two three four five", "one two three\nfour five"},
		{"a sentence that\ngoes on here.\nAnother.", "a sentence\nthat goes on\nhere.\nAnother."},
		{"head:\n\n  7  a meaning that is long\n", "head:\n\n  7  a meaning\n     that is\n     long\n"},
		{"unbreakable-as-it-is-long x", "unbreakable-as-it-is-long\nx"},
	} {
		if got := Wrap(tt.text, 14); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.text, got, tt.want)
		}
	}
}

func TestWrapCommand(t *testing.T) {
	const line = "  gpuaas nodes hold node-1 --reason 'two words of it' --yes"
	const want = "  gpuaas nodes hold node-1 \\\n      --reason 'two words of it' \\\n      --yes"
	if got := WrapCommand(line, 36); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := WrapCommand(line, len(line)); got != line {
		t.Errorf("%q", got)
	}
}
