package identity

import (
	"bytes"
	"context"
	"encoding/hex"
	"log/slog"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/recovery/identity/opened"
)

// forgedBy reports whether a connection presents a certificate of this serial with another key than the one issued,
// which only a holder of a key of the authority can make. A replica of an earlier build reports no key, and a
// certificate that was taken over after a restore may have none on record.
func (s Serial) forgedBy(o *recoveryv1.OpenSession) bool {
	return len(s.KeySHA256) > 0 && len(o.GetKeySha256()) > 0 && !bytes.Equal(s.KeySHA256, o.GetKeySha256())
}

// reportForged leaves evidence of a certificate that this mesh did not issue and that its authority has signed.
func (s *Identities) reportForged(ctx context.Context, o *recoveryv1.OpenSession) {
	s.deps.Logger.ErrorContext(ctx,
		"a certificate with an issued serial has another key: the authority's key may be in other hands",
		slog.String(obs.KeyNodeID, o.GetNodeId()), slog.String("serial", o.GetSerial()),
		slog.String("remote_address", o.GetRemoteAddress()),
		slog.String(obs.KeyReason, names.Of(commonv1.Reason_REASON_SERIAL_UNKNOWN)))
	refusal := fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN,
		"the certificate has an issued serial and another key than the one that was certified",
		fault.Remedy("find out who holds a key of the certificate authority; rotate it"))
	_ = s.deps.Audit.Refuse(ctx, audit.Entry{ // Refuse returns the refusal
		Action: "session.open", Actor: "node/" + o.GetNodeId(), SubjectType: "node", SubjectID: o.GetNodeId(),
		NodeID: o.GetNodeId(),
		Details: map[string]any{
			"evidence": "forged_certificate", "serial": o.GetSerial(), "remote_address": opened.Cut(o.GetRemoteAddress()),
			"key_fingerprint": hex.EncodeToString(o.GetKeySha256()),
		},
	}, refusal)
}

// adoptableKey returns the key to record with a certificate whose row the database has lost. It is nil if the replica
// reported no key or the node has another certificate for the same key.
func adoptableKey(ctx context.Context, tx pgx.Tx, r *Record, o *recoveryv1.OpenSession) ([]byte, error) {
	const size = 32
	if len(o.GetKeySha256()) != size {
		return nil, nil
	}
	_, found, err := SerialByKey(ctx, tx, r.NodeID, o.GetKeySha256())
	if err != nil || found {
		return nil, err
	}
	return o.GetKeySha256(), nil
}
