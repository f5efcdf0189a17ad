package recovery

import (
	"context"
	"crypto/ed25519"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

// recoveryTokenKeys is the directory, within that of the keys of join states, of the keys of recovery tokens.
const recoveryTokenKeys = "recovery-tokens"

// recoveryTokensRotate reports whether this replica can take part in a rotation of the key of recovery tokens. Until
// the first rotation the provisioner's key signs them, and a replica that cannot keep files of keys, or lacks the one
// from which the next key follows, serves as well without. A rotation is refused while there is such a replica.
func (s *Service) recoveryTokensRotate(ctx context.Context) (bool, error) {
	dir := filepath.Join(s.cfg.JoinStateKeys, recoveryTokenKeys)
	if found, err := filepath.Glob(filepath.Join(dir, "*.pem")); err != nil || len(found) > 0 {
		return true, err
	}
	known, err := tokens.CountKeys(ctx, s.base.DB)
	if err != nil {
		if pg.IsConnError(err) { // OpenKeys waits for the database, and reads the keys then
			return true, nil
		}
		return false, err
	}
	why := ""
	switch err := os.MkdirAll(dir, 0o700); {
	case known.Rotated > 0:
		return true, nil
	case known.Keys > 0:
		why = "the key that the other replicas have is not in it"
	case err != nil:
		why = err.Error()
	default:
		if err := unix.Access(dir, unix.W_OK); err != nil {
			why = err.Error()
		}
	}
	if why != "" {
		s.base.Logger.WarnContext(ctx, "the key of recovery tokens cannot be rotated by this replica",
			slog.String("directory", dir), slog.String("problem", why))
	}
	return why == "", nil
}

// recoveryTokenPart returns how a replica takes part in the keys of recovery tokens.
func (s *Service) recoveryTokenPart() keyset.Part {
	ring := s.keys.tokens
	return keyset.Part{
		Kind: keyset.RecoveryToken, Signs: true,
		Files: keyset.DirFiles(filepath.Join(s.cfg.JoinStateKeys, recoveryTokenKeys), "recovery-"),
		Outstanding: func(ctx context.Context, q pg.Querier, key keyset.Key) (string, error) {
			if key.First() {
				return tokens.NeedKey(ctx, q, ring.Provisioner())
			}
			return tokens.NeedKey(ctx, q, key.KeyID)
		},
		Changed: func(v keyset.View) error { return ring.Replace(recoveryKeysOf(v)) },
	}
}

// recoveryKeysOf returns the keys of recovery tokens in a view of their kind. The first key of the kind endorses those
// after it, and stands for the provisioner's key otherwise: that one signs and verifies while the set has it sign and
// verify.
func recoveryKeysOf(v keyset.View) ca.RecoveryKeys {
	out := ca.RecoveryKeys{
		Private: map[string]ed25519.PrivateKey{}, Verify: map[string]ed25519.PublicKey{}, Confirmed: v.Confirmed,
	}
	for _, row := range v.Rows {
		switch public, trusted := v.Verify.Key(row.KeyID); {
		case row.First():
			out.Provisioner = out.Provisioner || row.State != keyset.Retired
		case row.State == keyset.Retired:
			out.Retired = append(out.Retired, row.KeyID)
		case trusted:
			out.Verify[row.KeyID] = public
			if private := v.Privates[row.KeyID]; private != nil {
				out.Private[row.KeyID] = private
				if private.Equal(v.Signing) {
					out.Signing = row.KeyID
				}
			}
		}
	}
	return out
}
