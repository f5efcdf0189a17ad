package obs

import (
	"log/slog"
	"regexp"
	"strings"
)

// Redacted replaces a secret in a text.
const Redacted = "[redacted]"

var (
	pemBlock   = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)`)
	compactJWT = regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`)
	bearer     = regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`)
	assignment = regexp.MustCompile(
		`(?i)\b([a-z_-]*(?:password|secret|token|passwd|api_key))(["']?\s*[=:]\s*["']?)([^\s"'&,;]{4,})`,
	)
	urlUserinfo = regexp.MustCompile(`([a-z][a-z0-9+.-]*://[^\s/:@]+):[^\s/@]+@`)
	urlQuery    = regexp.MustCompile(`(https?|wss?)(://[^\s?"'<>]+)\?[^\s"'<>]*`)
)

// Redact returns s without what looks like a secret: private keys, JSON web tokens, bearer credentials, passwords in
// URLs and assignments, and the query string of any web address.
func Redact(s string) string {
	if !suspicious(s) {
		return s
	}
	s = pemBlock.ReplaceAllString(s, Redacted)
	s = compactJWT.ReplaceAllString(s, Redacted)
	s = bearer.ReplaceAllString(s, "$1 "+Redacted)
	s = urlUserinfo.ReplaceAllString(s, "$1:"+Redacted+"@")
	s = urlQuery.ReplaceAllString(s, "$1$2?"+Redacted)
	return assignment.ReplaceAllString(s, "$1$2"+Redacted)
}

// suspicious is a cheap test that makes the expressions above unnecessary for most lines.
func suspicious(s string) bool {
	if len(s) < 8 {
		return false
	}
	if strings.Contains(s, "://") || strings.Contains(s, "eyJ") || strings.Contains(s, "PRIVATE KEY") {
		return true
	}
	lower := strings.ToLower(s)
	for _, word := range []string{"bearer ", "basic ", "password", "passwd", "secret", "token", "api_key"} {
		if strings.Contains(lower, word) {
			return true
		}
	}
	return false
}

// Secret is text that prints as [redacted], so that printing it by accident does not disclose it; Reveal returns it.
type Secret string

// Reveal returns the text itself.
func (s Secret) Reveal() string { return string(s) }

// String hides the text.
func (s Secret) String() string { return Redacted }

// GoString hides the text from %#v.
func (s Secret) GoString() string { return Redacted }

// LogValue hides the text from slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(Redacted) }

// MarshalText hides the text from JSON and YAML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(Redacted), nil }
