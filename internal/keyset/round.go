package keyset

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

func (s *Set) round(ctx context.Context, start bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.underWay = true
	if start {
		// Reported before anything is read: a key that is made from now on waits for this replica.
		if err := s.report(ctx, nil, nil); err != nil {
			return err
		}
	}
	var batch pg.Batch
	due, sent := !start && s.reportIsDueLocked(), time.Now()
	if due {
		// Reported before the read as well, in the same transaction: a replica that was stopped for a while must count as
		// live before it decides.
		batch.Queue(saveReplica, s.saving(s.reported, s.problems)...)
	}
	began := s.now()
	rows, open, err := readSet(ctx, s.deps.Pool, &batch)
	if err != nil {
		return err
	}
	if due {
		s.reportedAt = sent
	}
	var holds, problems []string
	var failed []error
	for _, p := range s.parts {
		held, bad, err := s.one(ctx, p, roundOf{rows: rows, open: open, began: began, start: start})
		if err != nil && start {
			return err
		}
		// An error of one kind does not keep the others from being read.
		failed = append(failed, err)
		holds, problems = append(holds, held...), append(problems, bad...)
	}
	if s.issuers != nil {
		held, bad, err := s.certificates(ctx, roundOf{rows: rows, open: open, began: began, start: start})
		if err != nil && start {
			return err
		}
		failed = append(failed, err)
		holds, problems = append(holds, held...), append(problems, bad...)
	}
	s.logProblems(ctx, problems)
	// A request for an issuer of services waits for a file, whose change ends the pause.
	s.underWay = slices.ContainsFunc(open, func(r Rotation) bool { return r.Kind != Services }) ||
		slices.ContainsFunc(rows, func(row Key) bool { return row.State == VerifyOnly }) || errors.Join(failed...) != nil
	if !slices.Equal(holds, s.reported) || s.reportedAt.IsZero() || start {
		failed = append(failed, s.report(ctx, holds, problems))
	}
	return errors.Join(failed...)
}

// saving returns the arguments of saveReplica.
func (s *Set) saving(holds, problems []string) []any {
	takes := make([]string, 0, len(s.parts))
	for _, p := range s.parts {
		takes = append(takes, p.text(""))
		if p.Distributed != nil {
			takes = append(takes, distributes+string(p.Kind))
		}
	}
	if s.issuers != nil {
		takes = append(takes, trusts)
	}
	takes = append(takes, s.consumes...)
	return []any{s.deps.ReplicaID, takes, texts(holds), texts(problems)}
}

func (s *Set) report(ctx context.Context, holds, problems []string) error {
	if _, err := pg.Exec(ctx, s.deps.Pool, saveReplica, s.saving(holds, problems)...); err != nil {
		return fmt.Errorf("report keys: %w", err)
	}
	s.reported, s.reportedAt = holds, time.Now()
	return nil
}

// texts returns a list for a column that is never null.
func texts(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

func (s *Set) logProblems(ctx context.Context, problems []string) {
	if !slices.Equal(problems, s.problems) {
		for _, problem := range problems {
			s.deps.Logger.ErrorContext(ctx, "a key cannot be used; what was loaded before goes on serving",
				slog.String("problem", problem))
		}
		s.problems, s.reportedAt = problems, time.Time{}
	}
	if s.deps.OnProblems != nil {
		s.deps.OnProblems(ctx, problems)
	}
}

// roundOf holds the rows that a round has read.
type roundOf struct {
	rows  []Key
	open  []Rotation
	began time.Time
	start bool // it is the first
}

// one does a round for one kind. It returns the entries of the replica's report about the keys that it holds, and the
// problems. If a directory cannot be read or written, one returns a problem and an error, and the keys that were loaded
// before stay in use.
func (s *Set) one(ctx context.Context, p *part, r roundOf) ([]string, []string, error) {
	var holds, problems []string
	var err error
	all, start := r.rows, r.start
	rows := ofKind(p.Kind, all)
	var bad map[string]string
	var failed error
	if p.Signs {
		if rows, bad, failed = s.signer(ctx, p, rows, r.open); failed != nil {
			if start || p.view == nil {
				return nil, nil, failed
			}
			problems = append(problems, fmt.Sprintf("%s: %s", p.Kind, failed))
		}
	}
	pinned, err := p.pinned(rows)
	if err != nil {
		if start || p.view == nil {
			return nil, nil, err
		}
		bad = map[string]string{p.Pinned: err.Error()}
		pinned = publics(p.view.Verify)
	}
	trusted := Trusted(p.Kind, pinned, rows)
	differs := p.differs(rows, all, trusted, bad)
	if start && len(differs) > 0 {
		return nil, nil, differ(p, differs[0])
	}
	view := &View{
		Privates: map[string]ed25519.PrivateKey{}, Verify: keySet(trusted), Rows: rows,
		Confirmed: func() error { return p.mayStillSign(s.now()) },
	}
	confirmed := s.privates(p, view, rows)
	if view.Verify != nil && (!p.Signs || view.Signing != nil) && !view.same(p.view) {
		if p.Changed != nil {
			if err := p.Changed(*view); err != nil {
				return nil, nil, fmt.Errorf("use keys of %s: %w", p.Kind, err)
			}
		}
		p.view = view
	}
	if confirmed { // not before the keys are in use: until then the former key is what signs
		p.confirmed.Store(&r.began)
	}
	for _, row := range rows {
		if _, ok := view.Privates[row.KeyID]; row.State != Retired &&
			(p.Signs && ok || !p.Signs && trusted[row.KeyID] != nil) {
			holds = append(holds, p.text(row.KeyID))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bad)) {
		problems = append(problems, fmt.Sprintf("%s: %s: %s", p.Kind, name, bad[name]))
	}
	for _, d := range differs {
		problems = append(problems, fmt.Sprintf("%s differs: %s", p.Kind, d.what))
	}
	return holds, problems, failed
}

// signer reads the files of a part that signs and makes the changes that are due. It returns the rows as they are then,
// or with an error those that it was given.
func (s *Set) signer(ctx context.Context, p *part, rows []Key, open []Rotation) ([]Key, map[string]string, error) {
	keys, bad, err := p.Files.read(p.Kind)
	if err != nil {
		return rows, nil, err
	}
	p.keys = keys
	if !s.due(p, rows, open) {
		return rows, bad, nil
	}
	changed, err := s.drive(ctx, p)
	if err != nil {
		return rows, bad, err
	}
	return changed, bad, nil
}

func (p *part) private(keyID string) ed25519.PrivateKey {
	i := slices.IndexFunc(p.keys, func(k privateKey) bool { return k.id == keyID })
	if i < 0 {
		return nil
	}
	return p.keys[i].private
}

// pinned returns the keys that this replica trusts because of its files.
func (p *part) pinned(rows []Key) (map[string]ed25519.PublicKey, error) {
	out := map[string]ed25519.PublicKey{}
	if p.Signs {
		for _, key := range p.keys {
			if slices.ContainsFunc(rows, func(row Key) bool { return row.KeyID == key.id }) {
				out[key.id] = key.public()
			}
		}
	}
	if p.Relays {
		for _, row := range rows {
			out[row.KeyID] = row.PublicKey
		}
	}
	if p.Pinned == "" {
		return out, nil
	}
	raw, err := pki.ReadFile(p.Pinned)
	if err != nil {
		return nil, unreadable(p.Kind, p.Pinned, err)
	}
	set, err := pki.ParseKeySet(strings.TrimSpace(string(raw)))
	if err != nil {
		return nil, malformed(p.Kind, p.Pinned, err)
	}
	maps.Copy(out, publics(set))
	return out, nil
}

func publics(set *pki.KeySet) map[string]ed25519.PublicKey {
	out := map[string]ed25519.PublicKey{}
	if set == nil {
		return out
	}
	for _, id := range set.IDs() {
		out[id], _ = set.Key(id)
	}
	return out
}
