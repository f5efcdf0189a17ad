package plans

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"
)

// naming is how copies replace one id or name.
type naming struct {
	token string
	form  form // moment or any other
	level level
	kind  kind
	// prefix is the beginning of each copy of a name, and width how many digits follow.
	prefix string
	width  int
	at     int64 // the time in an id, in milliseconds
}

// kind is the kind of a token.
type kind int

const (
	ofName    kind = iota // of a tenant, a machine or a workspace
	ofBytes               // a digest as bytea is written
	ofID                  // a UUID with its time
	ofDigits              // any other, like the serial of a certificate
	ofNothing             // a UUID without a time: each copy has the same
)

func newNaming(p piece, at level) naming {
	t := naming{token: p.token, form: p.form, level: at, kind: ofDigits}
	switch {
	case p.token == tenantName || p.token == nodeName || p.token == workspaceName || p.token == endedName:
		t.kind, t.prefix = ofName, strings.TrimRight(p.token, "0")
		t.width = len(p.token) - len(t.prefix)
	case strings.HasPrefix(p.token, `\\x`):
		t.kind = ofBytes
	case uuids.MatchString(p.token):
		var err error
		t.kind = ofID
		if t.at, err = strconv.ParseInt(p.token[:8]+p.token[9:13], 16, 64); err != nil {
			t.kind = ofNothing
		}
	}
	return t
}

// of returns the replacement of the token in the copy with the given number; the first copy keeps the template's. The
// time in an id lies before the template's by the number of seconds in the argument earlier.
func (t naming) of(n, earlier int) string {
	switch {
	case n == 0, t.kind == ofNothing:
		return t.token
	case t.kind == ofName:
		digits := strconv.Itoa(n)
		return t.prefix + strings.Repeat("0", max(0, t.width-len(digits))) + digits
	}
	var text [96]byte
	sum := sha256.Sum256(strconv.AppendInt(append(text[:0], t.token...), int64(n), 10))
	var own [2 * sha256.Size]byte
	hex.Encode(own[:], sum[:])
	switch t.kind {
	case ofBytes:
		return `\\x` + string(own[:])
	case ofDigits:
		return string(own[:len(t.token)])
	case ofID, ofName, ofNothing:
	}
	var when [8]byte
	binary.BigEndian.PutUint64(when[:], uint64(t.at-int64(earlier)*1000)) // times of this century
	var id [36]byte
	copy(id[:], t.token)
	hex.Encode(id[:8], when[2:6])
	hex.Encode(id[9:13], when[6:])
	copy(id[15:18], own[:3])
	copy(id[20:23], own[3:6])
	copy(id[24:], own[6:18])
	return string(id[:])
}
