package findings

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

// applyBatch is how many subjects one transaction applies. Between two of them the findings are free for the other
// sweeps: the one for two instances of a workspace waits for one transaction, however much another sweep has seen.
const applyBatch = 500

// storedKey is the key of a suspicion or a finding as it is read.
type storedKey struct {
	Kind        string `db:"kind"`
	SubjectType string `db:"subject_type"`
	SubjectID   string `db:"subject_id"`
}

var keysOfSource = pg.Define(pg.RoleLifecycle, "findings.keys_of_source", `
	SELECT s.kind, s.subject_type, s.subject_id FROM lifecycle.suspicion s WHERE s.source = $1
	UNION SELECT f.kind, f.subject_type, f.subject_id FROM lifecycle.finding f
		WHERE f.resolved_at IS NULL AND f.source = $1`)

// applyScan writes the result of one complete scan: it adds and deletes suspicions, and opens and resolves findings. It
// does so in transactions of applyBatch subjects. If one fails, those before it stand, and the next scan applies the
// rest.
func (s *Sweeper) applyScan(ctx context.Context, source string, seen []finding.Seen, total *Swept) error {
	byKey := map[finding.Key]finding.Seen{}
	for _, x := range seen {
		if _, twice := byKey[x.Key()]; !twice {
			byKey[x.Key()] = x
		}
	}
	had, err := pg.All[storedKey](ctx, s.deps.DB, keysOfSource, source)
	if err != nil {
		return fmt.Errorf("read what was seen before: %w", err)
	}
	subjects := map[finding.Key]bool{}
	for _, k := range had {
		subjects[finding.Key(k)] = true
	}
	for k := range byKey {
		subjects[k] = true
	}
	for keys := range slices.Chunk(slices.SortedFunc(maps.Keys(subjects), finding.Compare), applyBatch) {
		if err := s.applyKeys(ctx, source, keys, byKey, total); err != nil {
			return fmt.Errorf("apply scan: %w", err)
		}
	}
	return nil
}

// applyKeys applies, in one transaction, the subjects of a scan that have one of the keys, in their order.
func (s *Sweeper) applyKeys(ctx context.Context, source string, keys []finding.Key, seen map[finding.Key]finding.Seen,
	total *Swept,
) error {
	there, gone := make([]finding.Key, 0, len(keys)), make([]finding.Key, 0)
	for _, k := range keys {
		if _, is := seen[k]; is {
			there = append(there, k)
		} else {
			gone = append(gone, k)
		}
	}
	var one Swept
	var opened finding.Opened
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		one = Swept{}
		if err := pg.Queue(ctx, tx, finding.TakeTurn); err != nil {
			return fmt.Errorf("wait for turn: %w", err)
		}
		var batch pg.Batch
		noted := s.queueSuspicions(&batch, source, there)
		standing := finding.QueueStanding(&batch, keys)
		if err := batch.Send(ctx, tx); err != nil {
			return fmt.Errorf("note suspicions: %w", err)
		}
		if err := standing.Parse(ctx); err != nil {
			return err
		}
		var sights []finding.Sight
		for _, k := range there {
			if note := noted[k]; seen[k].Certain || note.Ripe {
				sights = append(sights, finding.Sight{Seen: seen[k], Scans: note.Scans})
			}
		}
		var err error
		if opened, err = standing.Open(ctx, tx, source, sights); err != nil {
			return err
		}
		one.Suspected, one.Open, one.Opened = len(there)-len(sights), len(sights), len(opened.New)
		over := standing.Unseen(source, func(k finding.Key) bool { _, is := seen[k]; return is })
		if one.Resolved, err = s.end(ctx, tx, over); err != nil {
			return err
		}
		return forgetUnseen(ctx, tx, source, gone)
	})
	if err != nil {
		return err
	}
	if opened.Wrote || one.Resolved > 0 {
		s.deps.Committed()
	}
	for _, x := range opened.New {
		s.opened.WithLabelValues(names.Of(x.Kind)).Inc()
		s.deps.Logger.WarnContext(ctx, "finding", slog.String("kind", names.Of(x.Kind)),
			slog.String("severity", names.Of(x.Severity)), slog.String("subject", x.SubjectType+" "+x.SubjectID),
			slog.String("summary", x.Summary),
			slog.String(obs.KeyWorkspaceID, x.WorkspaceID),
			slog.String(obs.KeyNodeID, x.NodeID))
	}
	total.add(one)
	return nil
}

var forgetSuspicions = pg.Define(pg.RoleLifecycle, "findings.forget_suspicions", `
	DELETE FROM lifecycle.suspicion s
		USING unnest($2::text[], $3::text[], $4::text[]) AS x (kind, subject_type, subject_id)
		WHERE s.source = $1 AND s.kind = x.kind AND s.subject_type = x.subject_type AND s.subject_id = x.subject_id`)

// forgetUnseen deletes the suspicions of a source on what it no longer sees.
func forgetUnseen(ctx context.Context, tx pgx.Tx, source string, keys []finding.Key) error {
	if len(keys) == 0 {
		return nil
	}
	c := finding.ColumnsOf(keys)
	if err := pg.Queue(ctx, tx, forgetSuspicions, source, c.Kinds, c.Types, c.Subjects); err != nil {
		return fmt.Errorf("forget suspicions: %w", err)
	}
	return nil
}

var noteSuspicions = pg.Define(pg.RoleLifecycle, "findings.note_suspicions", `
		INSERT INTO lifecycle.suspicion AS s (kind, subject_type, subject_id, source)
		SELECT x.kind, x.subject_type, x.subject_id, $1
			FROM unnest($2::text[], $3::text[], $4::text[]) AS x (kind, subject_type, subject_id)
		ON CONFLICT (kind, subject_type, subject_id, source) DO UPDATE SET looks = s.looks + 1, seen_at = mesh.clock()
		RETURNING s.kind, s.subject_type, s.subject_id, s.looks AS scans,
			s.looks > 1 AND mesh.clock() - s.since >= make_interval(secs => $5) AS ripe`)

// noted is a suspicion as a scan has noted it.
type noted struct {
	finding.Key
	Scans int64 `db:"scans"` // how many scans of the source have seen it
	Ripe  bool  `db:"ripe"`  // it has been seen in two scans that are further apart than the grace
}

// queueSuspicions adds the statement to a batch that records what a scan saw as suspicions of its source. Those that
// are certain, or ripe, become findings. A suspicion stays while its source sees it, also once it is a finding: it
// counts the scans, and another source may hand the finding over to it.
func (s *Sweeper) queueSuspicions(b *pg.Batch, source string, keys []finding.Key) map[finding.Key]noted {
	out := map[finding.Key]noted{}
	if len(keys) == 0 {
		return out
	}
	c := finding.ColumnsOf(keys)
	b.Queue(noteSuspicions, source, c.Kinds, c.Types, c.Subjects, s.cfg.Grace.Seconds()).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[noted])
		for _, n := range all {
			out[n.Key] = n
		}
		return err
	})
	return out
}

var handOver = pg.Define(pg.RoleLifecycle, "findings.hand_over", `
		UPDATE lifecycle.finding f SET source = n.source
		FROM lifecycle.finding o CROSS JOIN LATERAL (
			SELECT s.source FROM lifecycle.suspicion s
			WHERE s.kind = o.kind AND s.subject_type = o.subject_type AND s.subject_id = o.subject_id
				AND s.source <> o.source
				AND (s.source = ANY ($2::text[]) OR s.seen_at > mesh.clock() - make_interval(secs => $3))
			ORDER BY s.since, s.source LIMIT 1) AS n
		WHERE o.finding_id = ANY ($1::uuid[]) AND f.finding_id = o.finding_id RETURNING f.finding_id::text`)

// end closes findings that their source does not see, and returns how many. A finding that another source sees as well
// becomes that source's, which describes it in its next scan or resolves it. A source that is gone sees nothing.
func (s *Sweeper) end(ctx context.Context, tx pgx.Tx, findingIDs []string) (int, error) {
	if len(findingIDs) == 0 {
		return 0, nil
	}
	handed, err := pg.Values[string](ctx, tx, handOver, findingIDs, s.sources, s.cfg.GoneAfter.Seconds())
	if err != nil {
		return 0, fmt.Errorf("hand findings over: %w", err)
	}
	over := slices.DeleteFunc(slices.Clone(findingIDs), func(id string) bool { return slices.Contains(handed, id) })
	if len(over) == 0 {
		return 0, nil
	}
	resolved, _, err := finding.Resolve(ctx, tx, over...)
	return len(resolved), err
}
