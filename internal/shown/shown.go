// Package shown names texts that a person was shown, so that a decision may carry what it is about and is refused if
// that has changed meanwhile. It decides nothing.
package shown

import (
	"crypto/sha256"
	"encoding/hex"
)

// Fingerprint returns the fingerprint of a text, 16 hexadecimal digits; of an empty text too.
func Fingerprint(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:8])
}
