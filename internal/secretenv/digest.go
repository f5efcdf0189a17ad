package secretenv

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
)

// Sum is the plain digest of a spec with its values. It is compared and never stored: an attacker could find short
// values from it by trying.
type Sum string

// SumOf returns the sum of a spec whose values are open: the same spec has the same sum.
func SumOf(spec *lifecyclev1.WorkspaceSpec) (Sum, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		return "", fmt.Errorf("encode spec: %w", err)
	}
	sum := sha256.Sum256(raw)
	return Sum(hex.EncodeToString(sum[:])), nil
}

// digestPrefix begins a keyed digest: `hmac-sha256.KEY.DIGEST`.
const digestPrefix = "hmac-sha256."

// Digest returns the digest of a sum under the first key, as it may be stored and shown.
func (k *Keys) Digest(sum Sum) (string, error) {
	if k == nil {
		return "", errNoKeys
	}
	return digestPrefix + k.first.id + "." + k.first.mac(sum), nil
}

func (k *key) mac(sum Sum) string {
	m := hmac.New(sha256.New, k.digest)
	m.Write([]byte(sum))
	return hex.EncodeToString(m.Sum(nil))
}

// Matches reports whether a stored digest is of this sum, whichever key of the set made it. A digest of a key that is
// not in the set is refused, since it cannot be compared. A digest that was stored before digests were keyed is
// compared as it is.
func (k *Keys) Matches(stored string, sum Sum) (bool, error) {
	rest, keyed := strings.CutPrefix(stored, digestPrefix)
	if !keyed {
		return hmac.Equal([]byte(stored), []byte(sum)), nil
	}
	id, mac, _ := strings.Cut(rest, ".")
	one, ok := k.find(id)
	if !ok {
		return false, unknownKey("the digest of the stored spec was made", id)
	}
	return hmac.Equal([]byte(mac), []byte(one.mac(sum))), nil
}

// Bare returns the sum in a stored digest that was not keyed; false if it is keyed, or no digest.
func Bare(stored string) (Sum, bool) {
	raw, err := hex.DecodeString(stored)
	return Sum(stored), err == nil && len(raw) == sha256.Size
}
