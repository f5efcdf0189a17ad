package diag

import (
	"regexp"
	"strings"
	"sync"
	"unicode"
)

type rule struct {
	find    *regexp.Regexp
	replace string
}

// rules remove what may be secret. The order matters: whole blocks first, then parts of a line.
var rules = sync.OnceValue(func() []rule {
	return []rule{
		{regexp.MustCompile(`(?s)-----BEGIN [^-]*-----.*?(-----END [^-]*-----|$)`), "[pem]"},
		{regexp.MustCompile(`\b(gbt|gls|grt)_[A-Za-z0-9_\-]+`), "[token]"},
		{regexp.MustCompile(`\beyJ[A-Za-z0-9_\-]*\.[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)?`), "[token]"},
		{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~\-]+`), "$1 [secret]"},
		{regexp.MustCompile(
			`(?i)\b(password|passwd|secret|token|api[_-]?key|authorization)(["']?\s*[=:]\s*["']?)[^\s"',;&]+`,
		), "$1$2[secret]"},
		{regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.\-]*://)[^\s/@"']+@`), "$1"},
		{regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.\-]*://[^\s?#"']*)[?#][^\s"']*`), "$1"},
		{regexp.MustCompile(`(/[^\s?"']*)\?[^\s"']+`), "$1"},
	}
})

// Sanitise returns a detail that may be stored and shown: one line of valid text, at most MaxDetail bytes, without
// tokens, credentials, key material and query strings. Sanitising the result again does not change it.
func Sanitise(s string) string {
	if len(s) > 8*MaxDetail {
		s = s[:8*MaxDetail]
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	for _, r := range rules() {
		s = r.find.ReplaceAllString(s, r.replace)
	}
	s = strings.Map(func(c rune) rune {
		switch {
		case c == '\n' || c == '\t' || c == '\r':
			return ' '
		case unicode.IsControl(c) || unicode.Is(unicode.Cf, c):
			return -1
		default:
			return c
		}
	}, s)
	s = strings.TrimSpace(s)
	if len(s) > MaxDetail {
		s = strings.ToValidUTF8(s[:MaxDetail], "")
	}
	return s
}
