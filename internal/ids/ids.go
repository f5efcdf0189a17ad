// Package ids makes and checks the identifiers and counters of the mesh.
//
// It owns the form of an id (UUIDv7 in its canonical lower-case spelling) and the arithmetic of the numbers that nodes
// and providers remember: epochs, generations and fences. It trusts no caller: every id that comes from outside goes
// through Valid. It never decides whether an id exists or whether a number is current; the database does.
//
// Guarantees: ids made by one process are strictly increasing as text, so an index on them fills from one side.
package ids

import "github.com/google/uuid"

// New returns a fresh UUIDv7 in canonical spelling. Later calls in the same process return larger text.
func New() string {
	return uuid.Must(uuid.NewV7()).String()
}

// Valid reports whether s is a UUIDv7 in canonical spelling (36 characters, lower case, with dashes).
func Valid(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case i == 8 || i == 13 || i == 18 || i == 23:
			if c != '-' {
				return false
			}
		case (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			return false
		}
	}
	return s[14] == '7' && (s[19] == '8' || s[19] == '9' || s[19] == 'a' || s[19] == 'b')
}
