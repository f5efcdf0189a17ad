package judge

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
	"github.com/gpuaas/mesh/services/recovery/silence"
)

// upToDate is the greatest age of unread events at which sessions and beats count as of one time. Sessions come as
// events and beats are read from their table: a node whose session moved while its events were unread would seem to be
// served by a replica that has gone.
const upToDate = 15 * time.Second

// seen is what a round finds before it takes any node.
type seen struct {
	Now       time.Time  `db:"now"`
	Listening *time.Time `db:"listening"` // since when replicas listen; nil: none does
	BeatAt    *time.Time `db:"beat_at"`   // the last one of any replica; nil: there never was one
	Lives     bool       `db:"lives"`     // some replica has a recent beat, if only one that leaves
	Rollback  bool       `db:"rolled_back"`
	// The incident of rollback mode; empty unless it is set, and while a declared one has none yet.
	RollbackIncident string `db:"rollback_incident"`
	// What the preflight of the authority has found, and since when, and its incident; empty unless it is a mismatch.
	Untrusted         string     `db:"untrusted"`
	UntrustedSince    *time.Time `db:"untrusted_since"`
	UntrustedIncident string     `db:"untrusted_incident"`
	Preflight         string     `db:"preflight"` // its state
	// What the ingress trusts as issuers of nodes' certificates, as fingerprints: the one that the preflight saw it trust
	// last, and those that each listening replica of nodeapi publishes, of the replicas that publish any.
	TrustedIssuer string     `db:"trusted_issuer"`
	Published     []string   `db:"published"`
	Unread        float64    `db:"unread"`   // seconds
	Due           *time.Time `db:"due"`      // the first of any node
	Silent        *time.Time `db:"silent"`   // when the first of the silent nodes was heard
	Probe         *time.Time `db:"probe"`    // the first that lifecycle is to be asked for
	Profiles      bool       `db:"profiles"` // some version has changed, and not all nodes that report it are due
	Through       *time.Time `db:"through"`
	Fleet         string     `db:"fleet"` // the reason of the verdict on the control plane
	// The replicas that serve nodes and beat no more, and their last beats.
	Lost   []string    `db:"lost"`
	LostAt []time.Time `db:"lost_at"`

	outageAfter time.Duration // see Deps.OutageAfter
}

// seenNow reads a few rows, however many nodes there are: replicas that serve nodes are found one by one in the index.
var seenNow = pg.Define(pg.RoleRecovery, "drift.read_now", `
	WITH RECURSIVE server AS (
		(SELECT j.replica_id FROM recovery.judgement j WHERE j.replica_id IS NOT NULL ORDER BY j.replica_id LIMIT 1)
		UNION ALL
		SELECT (SELECT j.replica_id FROM recovery.judgement j WHERE j.replica_id > s.replica_id
			ORDER BY j.replica_id LIMIT 1)
		FROM server s WHERE s.replica_id IS NOT NULL
	), lost AS (
		SELECT s.replica_id, COALESCE(p.beat_at, 'epoch') AS beat_at
		FROM server s LEFT JOIN mesh.replica p USING (replica_id)
		WHERE s.replica_id IS NOT NULL AND NOT COALESCE(`+beats.Lives("p")+`, false)
	)
	SELECT mesh.clock() AS now,
		`+beats.ListeningSince()+` AS listening,
		(SELECT max(l.beat_at) FROM mesh.replica l WHERE l.service = 'nodeapi') AS beat_at,
		EXISTS (SELECT FROM mesh.replica l WHERE `+beats.Lives("l")+`) AS lives,
		mesh.rolled_back() AS rolled_back,
		COALESCE((SELECT r.incident_id FROM recovery.rollback r WHERE r.state = 'active'), '') AS rollback_incident,
		CASE WHEN t.state = 'mismatch' THEN t.summary ELSE '' END AS untrusted,
		CASE WHEN t.state = 'mismatch' THEN t.since END AS untrusted_since,
		CASE WHEN t.state = 'mismatch' THEN t.incident_id ELSE '' END AS untrusted_incident,
		t.state AS preflight, t.trusted_issuer AS trusted_issuer,
		ARRAY(SELECT c.fingerprint FROM mesh.replica l, unnest(l.client_cas) c (fingerprint)
			WHERE `+beats.Listens("l")+` GROUP BY c.fingerprint HAVING count(DISTINCT l.replica_id) = (
				SELECT count(*) FROM mesh.replica l WHERE l.client_cas <> '{}' AND `+beats.Listens("l")+`)
			ORDER BY c.fingerprint) AS published,
		`+events.UnreadSQL("recovery", collect.ConsumerName)+`::float8 AS unread,
		(SELECT min(j.due_at) FROM recovery.judgement j) AS due,
		(SELECT min(j.silent_since) FROM recovery.judgement j) AS silent,
		(SELECT min(j.probe_due) FROM recovery.judgement j) AS probe,
		EXISTS (SELECT FROM recovery.profile_due) AS profiles,
		(SELECT d.through FROM mesh.judged d WHERE d.service = 'recovery' AND d.noted) AS through,
		(SELECT v.reason FROM recovery.verdict v WHERE v.node_id = '`+collect.EveryNode+`') AS fleet,
		ARRAY(SELECT l.replica_id::text FROM lost l ORDER BY l.replica_id) AS lost,
		ARRAY(SELECT l.beat_at FROM lost l ORDER BY l.replica_id) AS lost_at
	FROM recovery.ca_preflight t`)

func readSeen(ctx context.Context, tx pgx.Tx) (seen, error) {
	s, err := pg.One[seen](ctx, tx, seenNow)
	if err != nil {
		return seen{}, fmt.Errorf("look at who is heard: %w", err)
	}
	return s, nil
}

// rule returns when silence counts. While events are unread for long it does not.
func (s *seen) rule(after time.Duration) silence.Rule {
	r := silence.Rule{After: after}
	if s.Listening != nil && s.unread() <= upToDate {
		r.ListeningSince = *s.Listening
	}
	return r
}

func (s *seen) unread() time.Duration { return time.Duration(s.Unread * float64(time.Second)) }

// first reports whether the consumer has yet to read the log for the first time: nodes that were there when drift was
// installed may have been decided on since.
func (s *seen) first() bool { return s.Through == nil && s.unread() > upToDate }

// heardBefore returns the time before which a silent node must have been heard last to be down now, and whether any can
// be.
func heardBefore(r silence.Rule, now time.Time) (time.Time, bool) {
	at, ok := r.DownAt(time.Time{})
	return now.Add(-r.After), ok && !now.Before(at)
}

// gone returns the lost replicas whose nodes are down now, by their last beats.
func (s *seen) gone(r silence.Rule) map[string]time.Time {
	out := map[string]time.Time{}
	for i, id := range s.Lost {
		if r.Down(s.LostAt[i], s.Now) {
			out[id] = s.LostAt[i]
		}
	}
	return out
}

// nextAt returns when there is something to do, as far as that is known now.
func (s *seen) nextAt(r silence.Rule) time.Time {
	nextAt := s.Now.Add(every)
	earlier := func(at time.Time) {
		if at.After(s.Now) && at.Before(nextAt) {
			nextAt = at
		}
	}
	if s.Due != nil {
		earlier(*s.Due)
	}
	if s.Probe != nil {
		earlier(*s.Probe)
	}
	if s.BeatAt != nil { // without another beat an outage begins then
		earlier(s.BeatAt.Add(max(s.outageAfter, beats.SilentAfter)))
	}
	heard := s.LostAt
	if s.Silent != nil {
		heard = append(heard[:len(heard):len(heard)], *s.Silent)
	}
	for _, at := range heard {
		if down, ok := r.DownAt(at); ok {
			earlier(down)
		}
	}
	return nextAt
}
