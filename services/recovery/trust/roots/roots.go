// Package roots has the roots that replicas of nodeapi are sent beyond those of their own files: which they are, where
// each comes from, and how many there may be.
//
// It decides about the number alone. That a root is to be trusted, or no longer, is decided by package trust, in whose
// transactions it writes.
package roots

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

// Most bounds the number of roots that replicas of nodeapi are sent.
const Most = 16

// Where the row of a trusted issuer comes from.
const (
	OfRotation = "rotation"
	OfRepair   = "repair"
)

// issuerRow is a root that replicas of nodeapi are sent.
type issuerRow struct {
	Fingerprint string    `db:"fingerprint"`
	Name        string    `db:"name"`
	NotAfter    time.Time `db:"not_after"`
	Origin      string    `db:"origin"`
	Reason      string    `db:"reason"`
	By          string    `db:"decided_by"`
	Since       time.Time `db:"since"`
}

var (
	readIssuers = pg.Define(pg.RoleRecovery, "trust.read_issuers", `
		SELECT `+pg.Columns[issuerRow]("i")+` FROM recovery.trusted_issuer i ORDER BY i.since, i.fingerprint`)

	readCertificates = pg.Define(pg.RoleRecovery, "trust.read_certificates_of_issuers", `
		SELECT i.certificate FROM recovery.trusted_issuer i ORDER BY i.fingerprint`)

	countIssuers = pg.Define(pg.RoleRecovery, "trust.count_issuers", `
		SELECT count(*)::int FROM recovery.trusted_issuer i WHERE i.fingerprint <> $1`)

	insertIssuer = pg.Define(pg.RoleRecovery, "trust.insert_issuer", `
		INSERT INTO recovery.trusted_issuer (fingerprint, name, certificate, not_after, origin, reason, decided_by)
		VALUES ($1, left($2, 256), $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING`)

	deleteRepair = pg.Define(pg.RoleRecovery, "trust.delete_repair", `
		DELETE FROM recovery.trusted_issuer WHERE fingerprint = $1 AND origin = 'repair'`)

	deleteIssuer = pg.Define(pg.RoleRecovery, "trust.delete_issuer", `
		DELETE FROM recovery.trusted_issuer WHERE fingerprint = $1`)
)

// Certificates returns the roots that replicas of nodeapi are sent, in DER.
func Certificates(ctx context.Context, q pg.Querier) ([][]byte, error) {
	list, err := pg.Values[[]byte](ctx, q, readCertificates)
	if err != nil {
		return nil, fmt.Errorf("read trusted issuers: %w", err)
	}
	return list, nil
}

// Trust adds a root to those that replicas of nodeapi are sent, if it is not among them.
func Trust(ctx context.Context, tx pgx.Tx, root *x509.Certificate, origin, reason, by string) error {
	fingerprint := pki.Fingerprint(root)
	if err := CheckRoom(ctx, tx, fingerprint); err != nil {
		return err
	}
	if _, err := pg.Exec(ctx, tx, insertIssuer, fingerprint, root.Subject.CommonName, root.Raw, root.NotAfter, origin,
		reason, by); err != nil {
		return fmt.Errorf("write trusted issuer: %w", err)
	}
	return nil
}

// CheckRoom returns a fault if replicas of nodeapi are sent as many roots as may be, without the one of a fingerprint.
func CheckRoom(ctx context.Context, tx pgx.Tx, fingerprint string) error {
	count, err := pg.Value[int](ctx, tx, countIssuers, fingerprint)
	if err != nil {
		return fmt.Errorf("count trusted issuers: %w", err)
	}
	if count >= Most {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			fmt.Sprintf("replicas of nodeapi are sent %d roots already, which is the limit", count),
			fault.Unmet(fmt.Sprintf("fewer than %d roots are sent", Most)),
			fault.Remedy("withdraw those that no certificate needs: `gpuaas ca status` shows them, `gpuaas ca repair "+
				"--withdraw --root FINGERPRINT --reason TEXT`"))
	}
	return nil
}

// Distrust removes a root from those that replicas of nodeapi are sent, and reports whether it was among them.
func Distrust(ctx context.Context, tx pgx.Tx, fingerprint string) (bool, error) {
	tag, err := pg.Exec(ctx, tx, deleteIssuer, fingerprint)
	if err != nil {
		return false, fmt.Errorf("delete trusted issuer: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

// EndRepair removes a root that a repair has added, and reports whether there was one.
func EndRepair(ctx context.Context, tx pgx.Tx, fingerprint string) (bool, error) {
	tag, err := pg.Exec(ctx, tx, deleteRepair, fingerprint)
	if err != nil {
		return false, fmt.Errorf("delete trusted issuer: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

// List returns the roots as responses carry them, those trusted longest first.
func List(ctx context.Context, q pg.Querier) ([]*recoveryv1.TrustedIssuer, error) {
	rows, err := pg.All[issuerRow](ctx, q, readIssuers)
	if err != nil {
		return nil, fmt.Errorf("read trusted issuers: %w", err)
	}
	out := make([]*recoveryv1.TrustedIssuer, 0, len(rows))
	for _, row := range rows {
		out = append(out, &recoveryv1.TrustedIssuer{
			Fingerprint: row.Fingerprint, Name: row.Name, NotAfter: timestamppb.New(row.NotAfter), Origin: row.Origin,
			Reason: row.Reason, By: row.By, Since: timestamppb.New(row.Since),
		})
	}
	return out, nil
}
