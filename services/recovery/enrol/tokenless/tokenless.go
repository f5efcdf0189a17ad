// Package tokenless decides whether a host that says that it has no recovery token to send is the node that it claims
// to be. It believes only a signature and rows of certificates, changes nothing, and never decides what a claim means
// for the node.
package tokenless

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// Proven reports whether a claim is signed by the key of a certificate that counts for the node that it names, and that
// has expired. A host whose certificate is in its time needs no token; and once the node has confirmed another
// certificate, a claim of before proves nothing any more.
func Proven(ctx context.Context, q pg.Querier, m *recoveryv1.TokenMissing) (bool, error) {
	if recoverykey.VerifyMissing(m.GetPublicKey(), m.GetNodeId(), m.GetSerial(), m.GetProof()) != nil {
		return false, nil //nolint:nilerr // what is not proven is no error
	}
	serial, found, err := identity.SerialByName(ctx, q, m.GetSerial())
	if err != nil {
		return false, fmt.Errorf("read certificate of a claim: %w", err)
	}
	counts := serial.State == commonv1.SerialState_SERIAL_STATE_NEXT ||
		serial.State == commonv1.SerialState_SERIAL_STATE_CURRENT
	sum := sha256.Sum256(m.GetPublicKey())
	if !found || serial.Unreadable || !counts || serial.NodeID != m.GetNodeId() ||
		!bytes.Equal(serial.KeySHA256, sum[:]) {
		return false, nil
	}
	moment, err := identity.ReadMoment(ctx, q)
	if err != nil {
		return false, err
	}
	return !moment.Now.Before(serial.NotAfter), nil
}
