package collect

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// topicProfile is the topic of the profile that a node reports.
const topicProfile = "profile"

// profileRow is a row of recovery.node_profile: the agent's word.
type profileRow struct {
	NodeID      string    `db:"node_id" expr:"@.node_id::text"`
	Name        string    `db:"name"`
	Fingerprint string    `db:"fingerprint"`
	ReportedAt  time.Time `db:"reported_at"`
}

// reportedProfile is what a node reports beside the version that has this fingerprint, if there is one.
type reportedProfile struct {
	profileRow
	Phase   string     `db:"phase"` // empty: there is no such version
	PhaseAt *time.Time `db:"phase_at"`
	Of      string     `db:"of"` // its name
	Number  int64      `db:"number"`
}

var (
	readProfiles = pg.Define(pg.RoleRecovery, "drift.read_profiles", `
		SELECT `+pg.Columns[profileRow]("n")+` FROM recovery.node_profile n WHERE n.node_id = ANY ($1::uuid[])`)

	// A mesh without an active version is one whose replicas have not taken the configured one yet: nothing is judged.
	readReported = pg.Define(pg.RoleRecovery, "drift.read_reported_profiles", `
		SELECT `+pg.Columns[profileRow]("n")+`, COALESCE(p.phase, '') AS phase, p.phase_at AS phase_at,
			COALESCE(p.name, '') AS of, COALESCE(p.number, 0) AS number
		FROM recovery.node_profile n LEFT JOIN recovery.profile p USING (fingerprint)
		WHERE n.node_id = ANY ($1::uuid[]) AND EXISTS (SELECT FROM recovery.profile a WHERE a.phase = 'active')`)

	writeProfile = pg.Define(pg.RoleRecovery, "drift.write_profile", `
		INSERT INTO recovery.node_profile AS n (node_id, name, fingerprint, reported_at) VALUES ($1, $2, $3, $4)
		ON CONFLICT (node_id) DO UPDATE SET name = EXCLUDED.name, fingerprint = EXCLUDED.fingerprint,
			reported_at = EXCLUDED.reported_at`)
)

// profileReported keeps the profile that the newest session of a node reports. An agent of an earlier build reports
// none.
func (n *Node) profileReported(s *nodev1.SessionChanged, at time.Time) {
	reported := s.GetProfile()
	if reported.GetFingerprint() == "" {
		return
	}
	now := profileRow{
		NodeID: n.NodeID, Name: plain(reported.GetName()), Fingerprint: plain(reported.GetFingerprint()), ReportedAt: at,
	}
	if n.profile == nil || n.profile.Fingerprint != now.Fingerprint || n.profile.Name != now.Name {
		n.profile, n.profileNews = &now, true
	}
}

// noteProfile compares what a node reports with the versions as they are now: all but a retired one are valid.
func (n *Node) noteProfile(r *reportedProfile) {
	e := drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_ENDPOINT, Source: drift.FromSession, ObservedAt: r.ReportedAt,
	}
	switch r.Phase {
	case "":
		e.Detail = "it reports a profile that recovery does not know, of fingerprint " + Cut(r.Fingerprint, 16)
	case retiredPhase:
		e.Detail = fmt.Sprintf("it reports version %d of profile %s, which is retired", r.Number, r.Of)
		if r.PhaseAt != nil && r.PhaseAt.After(e.ObservedAt) {
			e.ObservedAt = *r.PhaseAt
		}
	}
	if e.Detail != "" {
		e.Reason = commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT
	}
	n.NoteTopic(topicProfile, e)
}

// retiredPhase is the phase of a version that is not valid, as it is stored.
const retiredPhase = "retired"

// loadProfiles adds the stored profiles of nodes to them.
func loadProfiles(ctx context.Context, tx pgx.Tx, nodes map[string]*Node, of []string) error {
	if len(of) == 0 {
		return nil
	}
	rows, err := pg.All[profileRow](ctx, tx, readProfiles, of)
	if err != nil {
		return fmt.Errorf("read profiles of nodes: %w", err)
	}
	for i := range rows {
		if n := nodes[rows[i].NodeID]; n != nil {
			n.profile = &rows[i]
		}
	}
	return nil
}

// NoteProfiles keeps what the profiles of nodes are evidence of now.
func NoteProfiles(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	rows, err := pg.All[reportedProfile](ctx, tx, readReported, IDsOf(nodes))
	if err != nil {
		return fmt.Errorf("read profiles that nodes report: %w", err)
	}
	for i := range rows {
		if n := nodes[rows[i].NodeID]; n != nil {
			n.noteProfile(&rows[i])
		}
	}
	return nil
}

// saveProfiles writes the profiles of nodes that have changed. It comes after their rows.
func saveProfiles(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	for _, id := range IDsOf(nodes) {
		n := nodes[id]
		if !n.profileNews {
			continue
		}
		p := n.profile
		if err := pg.Queue(ctx, tx, writeProfile, p.NodeID, p.Name, p.Fingerprint, p.ReportedAt); err != nil {
			return fmt.Errorf("write profile of a node: %w", err)
		}
	}
	return nil
}
