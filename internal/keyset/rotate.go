package keyset

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Overlap returns the least time for which a former key of the kind verifies after the next one signs. Replicas read at
// different moments which key signs, and messages signed with the former key are still under way.
func (k Kind) Overlap() time.Duration { return 2 * time.Minute }

// mostKeys bounds the keys of a kind that are not retired, far below what a pki.KeySet takes.
const mostKeys = 8

// Request is an operator's request for a new key of a kind.
type Request struct {
	Kind           Kind
	IdempotencyKey string
	By, Reason     string
}

// Ask stores a rotation, which the service that signs then carries out. It refuses one while the overlap of an earlier
// one is not over. The same idempotency key gets the same rotation, and so does a further request for an issuer of
// services while one waits for its certificate; the idempotency key of that request then gets this rotation too. The
// flag reports whether this call stored it.
func Ask(ctx context.Context, tx pgx.Tx, req Request) (Rotation, bool, error) {
	if _, err := pg.Exec(ctx, tx, takeKindLockOfRotation); err != nil {
		return Rotation{}, false, fmt.Errorf("take lock of rotations: %w", err)
	}
	known, err := pg.One[Rotation](ctx, tx, readRotation, req.IdempotencyKey)
	switch {
	case err == nil && known.Kind == req.Kind:
		return known, false, nil
	case err == nil:
		return Rotation{}, false, fault.New(commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED, "")
	case !pg.IsNoRows(err):
		return Rotation{}, false, fmt.Errorf("read rotation: %w", err)
	}
	if err := Check(ctx, tx, req.Kind); err != nil {
		return Rotation{}, false, err
	}
	open, err := pg.All[Rotation](ctx, tx, readOpenRotations)
	if err != nil {
		return Rotation{}, false, fmt.Errorf("read rotations: %w", err)
	}
	if at := slices.IndexFunc(open, func(r Rotation) bool { return r.Kind == Services && req.Kind == Services }); at >= 0 {
		if _, err := pg.Exec(ctx, tx, insertRepeat, req.IdempotencyKey, open[at].ID); err != nil {
			return Rotation{}, false, fmt.Errorf("write repeated request: %w", err)
		}
		return open[at], false, nil
	}
	made, err := pg.One[Rotation](ctx, tx, insertRotation, ids.New(), string(req.Kind), req.IdempotencyKey, req.By,
		req.Reason)
	if err != nil {
		return Rotation{}, false, fmt.Errorf("write rotation: %w", err)
	}
	return made, true, nil
}

// Check returns an error if a rotation cannot be requested now; that of fault key_rotation_under_way contains when it
// can.
func Check(ctx context.Context, tx pgx.Tx, kind Kind) error {
	all, err := ReadKeys(ctx, tx)
	if err != nil {
		return err
	}
	open, err := pg.All[Rotation](ctx, tx, readOpenRotations)
	if err != nil {
		return fmt.Errorf("read rotations: %w", err)
	}
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	if err := outdated(ctx, tx, kind); err != nil {
		return err
	}
	if err := unsound(ctx, tx, kind); err != nil {
		return err
	}
	rows := ofKind(kind, all)
	if len(rows) == 0 {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, fmt.Sprintf("there is no key of %s yet", kind),
			fault.Remedy("start the service that signs: it makes the first key"))
	}
	if slices.ContainsFunc(open, func(r Rotation) bool { return r.Kind == kind }) {
		if kind == Services {
			return nil // Ask returns the same rotation again
		}
		return refuse("a rotation of " + string(kind) + " was asked for, and its key is being made")
	}
	if next := in(VerifyOnly, kind, rows); len(next) > 0 {
		waits := next[0].NeededBy
		if waits == "" {
			waits = "the replicas that take part"
		}
		return refuse(fmt.Sprintf("key %s of %s does not sign yet: it waits for %s", next[0].KeyID, kind, waits))
	}
	former := in(VerifyingAfter, kind, rows)
	for _, key := range former {
		if until := key.StateAt.Add(kind.Overlap()); now.Before(until) && hasSuccessor(key, rows) {
			return refuse(fmt.Sprintf("key %s of %s was succeeded a moment ago; the next rotation can be asked for at %s",
				key.KeyID, kind, until.UTC().Format(time.RFC3339)), fault.RetryAfter(until.Sub(now)))
		}
	}
	if len(former) >= mostKeys {
		var needs []string
		for _, key := range former {
			needs = append(needs, key.KeyID+" by "+key.NeededBy)
		}
		return refuse(fmt.Sprintf("%d former keys of %s are needed still", len(former), kind), fault.Unmet(needs...),
			fault.Remedy("let the nodes that `gpuaas keys list` names connect once, or retire them: "+strings.Join(needs, "; ")))
	}
	return nil
}

// outdated refuses a new key of tasks while a live replica is of a build that does not wait for agents, or does not
// send them keys, a new issuer of services while a live replica does not follow issuers, and a new key of recovery
// tokens while a live replica of recovery knows the provisioner's key alone: it is of an earlier build, or lacks files.
func outdated(ctx context.Context, tx pgx.Tx, kind Kind) error {
	if kind != TaskSigning && kind != Services && kind != RecoveryToken {
		return nil
	}
	live, err := pg.All[replica](ctx, tx, readReplicas, liveFor.Seconds())
	if err != nil {
		return fmt.Errorf("read holders of keys: %w", err)
	}
	var names []string
	for _, r := range live {
		signsAlone := slices.Contains(r.Takes, "sign:"+string(kind)) && !slices.Contains(r.Takes, distributes+string(kind))
		sendsNone := r.Service == pg.RoleNodeAPI && !slices.Contains(r.Takes, "verify:"+string(kind))
		switch kind {
		case Services:
			signsAlone, sendsNone = !slices.Contains(r.Takes, trusts), false
		case RecoveryToken:
			signsAlone, sendsNone = r.Service == pg.RoleRecovery && !slices.Contains(r.Takes, "sign:"+string(kind)), false
		case JoinState, TaskSigning, Assertion:
		}
		if signsAlone || sendsNone {
			names = append(names, r.Service+" "+r.ReplicaID)
		}
	}
	if len(names) == 0 {
		return nil
	}
	if kind == RecoveryToken {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"replicas of recovery know one key of recovery tokens: "+strings.Join(names, ", "),
			fault.Remedy("update these replicas, or give each the directory recovery-tokens within join_state_keys, writable "+
				"and with the files of the others; restart them, and ask again"))
	}
	if kind == Services {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"replicas of an earlier build do not follow the issuers: "+strings.Join(names, ", "),
			fault.Remedy("update these replicas and ask again"))
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		"replicas of an earlier build do not send agents a new key of tasks: "+strings.Join(names, ", "),
		fault.Unmet("each replica of lifecycle and nodeapi is of a build that rotates task_signing"),
		fault.Remedy("update these replicas and ask again"))
}

// unsound refuses a new key while a live replica reports that it cannot use a file of the kind. Such a replica may be
// the one that has to make the key, or the one that all others would wait for. An issuer of services is made of a file
// that a person brings after the request. A file that is missing is no such problem: a rotation is the way out where a
// key is lost.
func unsound(ctx context.Context, tx pgx.Tx, kind Kind) error {
	if kind == Services {
		return nil
	}
	live, err := pg.All[replica](ctx, tx, readReplicas, liveFor.Seconds())
	if err != nil {
		return fmt.Errorf("read holders of keys: %w", err)
	}
	for _, r := range live {
		for _, problem := range r.Problems {
			if what, ok := strings.CutPrefix(problem, string(kind)+": "); ok {
				return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
					fmt.Sprintf("replica %s of %s cannot use its files of %s: %s", r.ReplicaID, r.Service, kind, what),
					fault.Unmet("no replica that `gpuaas keys list` names has a problem with its files of "+string(kind)),
					fault.Remedy("repair the file or its mode, or copy it from a replica that holds it; the replica reads it "+
						"again by itself; then ask again"))
			}
		}
	}
	return nil
}

// hasSuccessor reports whether a rotation made a successor of a key, and the key was not just registered as a former
// one at the first start.
func hasSuccessor(key Key, rows []Key) bool {
	return slices.ContainsFunc(rows, func(row Key) bool { return row.EndorsedBy == key.KeyID })
}

func refuse(message string, opts ...fault.Option) error {
	return fault.New(commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY, message, opts...)
}

// Holder is a replica whose last report still counts.
type Holder struct {
	Service, ReplicaID string
	SeenAt             time.Time
	Problems           []string
	Holds              map[string]bool // by key id
}

// Holders returns the live replicas and the keys that they hold.
func Holders(ctx context.Context, tx pgx.Tx) ([]Holder, error) {
	live, err := pg.All[replica](ctx, tx, readReplicas, liveFor.Seconds())
	if err != nil {
		return nil, fmt.Errorf("read holders of keys: %w", err)
	}
	out := make([]Holder, 0, len(live))
	for _, r := range live {
		h := Holder{
			Service: r.Service, ReplicaID: r.ReplicaID, SeenAt: r.SeenAt, Problems: r.Problems,
			Holds: map[string]bool{},
		}
		for _, word := range r.Holds {
			h.Holds[word[strings.LastIndexByte(word, ':')+1:]] = true
		}
		out = append(out, h)
	}
	return out, nil
}
