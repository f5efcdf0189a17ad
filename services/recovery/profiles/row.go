package profiles

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// The phases of a version, as they are stored.
var (
	announced = names.Of(recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED)
	active    = names.Of(recoveryv1.ProfilePhase_PROFILE_PHASE_ACTIVE)
	retiring  = names.Of(recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRING)
	retired   = names.Of(recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRED)
)

// row is one version as it is stored.
type row struct {
	ID               string    `db:"profile_id" expr:"@.profile_id::text"`
	Name             string    `db:"name"`
	Number           int64     `db:"number"`
	Fingerprint      string    `db:"fingerprint"`
	APIURL           string    `db:"api_url"`
	RecoveryURL      string    `db:"recovery_url"`
	TerminalURL      string    `db:"terminal_url"`
	CABundle         []byte    `db:"ca_bundle"`
	RecoveryCABundle []byte    `db:"recovery_ca_bundle"`
	Phase            string    `db:"phase"`
	PhaseAt          time.Time `db:"phase_at"`
	PhaseBy          string    `db:"phase_by"`
	PhaseReason      string    `db:"phase_reason"`
	CreatedAt        time.Time `db:"created_at"`
	Version          int64     `db:"version"`
}

var (
	lockHead = pg.Define(pg.RoleRecovery, "profiles.lock_head", `
		SELECT h.revision FROM recovery.profile_head h FOR UPDATE`)

	raiseHead = pg.Define(pg.RoleRecovery, "profiles.raise_head", `
		UPDATE recovery.profile_head SET revision = revision + 1`)

	readHead = pg.Define(pg.RoleRecovery, "profiles.read_head", `SELECT h.revision FROM recovery.profile_head h`)

	readValid = pg.Define(pg.RoleRecovery, "profiles.read_valid", `
		SELECT `+pg.Columns[row]("p")+` FROM recovery.profile p WHERE p.phase <> 'retired' ORDER BY p.name, p.number`)

	readOfContent = pg.Define(pg.RoleRecovery, "profiles.read_of_content", `
		SELECT `+pg.Columns[row]("p")+` FROM recovery.profile p WHERE p.fingerprint = $1`)

	readOfNumber = pg.Define(pg.RoleRecovery, "profiles.read_of_number", `
		SELECT `+pg.Columns[row]("p")+` FROM recovery.profile p WHERE p.name = $1 AND p.number = $2`)

	readInPhase = pg.Define(pg.RoleRecovery, "profiles.read_in_phase", `
		SELECT `+pg.Columns[row]("p")+` FROM recovery.profile p WHERE p.name = $1 AND p.phase = $2`)

	insertVersion = pg.Define(pg.RoleRecovery, "profiles.insert", `
		INSERT INTO recovery.profile AS p (profile_id, name, number, fingerprint, api_url, recovery_url, terminal_url,
			ca_bundle, recovery_ca_bundle, phase, phase_by, phase_reason)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'announced', $10, $11) RETURNING `+pg.Columns[row]("p"))

	enterPhase = pg.Define(pg.RoleRecovery, "profiles.enter_phase", `
		UPDATE recovery.profile p SET phase = $3, phase_at = mesh.clock(), phase_by = $4, phase_reason = $5,
			version = p.version + 1
		WHERE p.profile_id = $1 AND p.version = $2 RETURNING `+pg.Columns[row]("p"))

	readStale = pg.Define(pg.RoleRecovery, "profiles.read_stale", `
		SELECT `+pg.Columns[row]("p")+` FROM recovery.profile p
		WHERE p.name = $1 AND p.phase = 'retiring' AND p.phase_by = $2 AND p.phase_at < mesh.clock() - interval '30 days'
			AND NOT EXISTS (SELECT `+reporting+`) ORDER BY p.number LIMIT 100`)

	readConfigured = pg.Define(pg.RoleRecovery, "profiles.read_configured", `
		SELECT n.configured FROM recovery.profile_name n WHERE n.name = $1`)

	readNewest = pg.Define(pg.RoleRecovery, "profiles.read_newest", `
		SELECT n.newest FROM recovery.profile_name n WHERE n.name = $1`)

	// Agents remember the numbers of their versions, so a number carries the era as all that others remember does.
	drawNumber = pg.Define(pg.RoleRecovery, "profiles.draw_number", `
		INSERT INTO recovery.profile_name AS n (name, newest) VALUES ($1, mesh.next(0))
		ON CONFLICT (name) DO UPDATE SET newest = mesh.next(n.newest) RETURNING n.newest`)

	readHighest = pg.Define(pg.RoleRecovery, "profiles.read_highest", `
		SELECT GREATEST(n.newest, mesh.next(0)) FROM recovery.profile_name n WHERE n.name = $1`)

	changeNumber = pg.Define(pg.RoleRecovery, "profiles.change_number", `
		UPDATE recovery.profile p SET number = $3, version = p.version + 1
		WHERE p.profile_id = $1 AND p.version = $2 RETURNING `+pg.Columns[row]("p"))

	noteConfigured = pg.Define(pg.RoleRecovery, "profiles.note_configured", `
		INSERT INTO recovery.profile_name (name, configured) VALUES ($1, $2)
		ON CONFLICT (name) DO UPDATE SET configured = EXCLUDED.configured`)
)

// profile returns the content with the number of the version.
func (r *row) profile() *commonv1.Profile {
	return &commonv1.Profile{
		Name: r.Name, Fingerprint: r.Fingerprint, ApiUrl: r.APIURL, RecoveryUrl: r.RecoveryURL,
		TerminalUrl: r.TerminalURL, CaBundlePem: r.CABundle, RecoveryCaBundlePem: r.RecoveryCABundle, Version: r.Number,
	}
}

// proto returns the version as responses carry it. A phase that this build does not know is shown as unspecified.
func (r *row) proto(defaultName string) *recoveryv1.ProfileVersion {
	phase := aside.Value[recoveryv1.ProfilePhase]("profiles", r.ID, r.Phase)
	return &recoveryv1.ProfileVersion{
		Profile: r.profile(), Phase: phase, Since: timestamppb.New(r.PhaseAt), By: r.PhaseBy, Reason: r.PhaseReason,
		Version: r.Version, CreatedAt: timestamppb.New(r.CreatedAt), DefaultName: r.Name == defaultName,
	}
}

// event returns the event of a change, without the bundles: the fingerprint names them.
func (r *row) event(defaultName string) events.Event {
	body := r.proto(defaultName)
	body.Profile.CaBundlePem, body.Profile.RecoveryCaBundlePem = nil, nil
	return events.Event{
		Kind: "profile.changed", AggregateType: "profile", AggregateID: r.ID, AggregateVersion: r.Version, Payload: body,
	}
}

// Fingerprint returns the fingerprint of a profile's content, which covers all its fields but the number of the
// version: an agent and its control plane notice by it when they have different profiles.
func Fingerprint(p *commonv1.Profile) string {
	sum := sha256.New()
	for _, part := range []string{
		p.GetName(), p.GetApiUrl(), p.GetRecoveryUrl(), p.GetTerminalUrl(), string(p.GetCaBundlePem()),
		string(p.GetRecoveryCaBundlePem()),
	} {
		fmt.Fprintf(sum, "%d:%s", len(part), part)
	}
	return hex.EncodeToString(sum.Sum(nil))
}
