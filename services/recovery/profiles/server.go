package profiles

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/rollback"
)

const (
	// mostValid is how many valid versions there are before a person must retire one to set another: each is sent to
	// each replica of nodeapi.
	mostValid = 100
	// mostTrust bounds the trust of all versions that are sent whole to each replica of nodeapi, in one message, in bytes.
	mostTrust = 4 << 20
)

// Server implements ProfileService over a Book. Safe for concurrent use.
type Server struct {
	book      *Book
	verifying chan struct{}
}

// NewServer returns the server.
func NewServer(book *Book) *Server {
	return &Server{book: book, verifying: make(chan struct{}, verifications)}
}

const reporting = `
	FROM recovery.node_profile n JOIN recovery.identity i USING (node_id)
	WHERE n.fingerprint = p.fingerprint AND i.state <> 'retired'`

var (
	countReporting = pg.Define(pg.RoleRecovery, "profiles.count_reporting", `
		SELECT (SELECT count(*) `+reporting+`) FROM recovery.profile p WHERE p.profile_id = $1`)

	countValid = pg.Define(pg.RoleRecovery, "profiles.count_valid", `
		SELECT count(*) FROM recovery.profile p WHERE p.phase <> 'retired'`)

	// sumTrust is of the versions that are offered or may be, without those of one name.
	sumTrust = pg.Define(pg.RoleRecovery, "profiles.sum_trust", `
		SELECT COALESCE(sum(octet_length(p.ca_bundle) + octet_length(p.recovery_ca_bundle)), 0)::bigint
		FROM recovery.profile p WHERE p.phase IN ('announced', 'active') AND p.name <> $1`)
)

// SetProfile verifies the endpoints of a content, and announces it.
func (s *Server) SetProfile(ctx context.Context, req *recoveryv1.SetProfileRequest) (*recoveryv1.SetProfileResponse,
	error,
) {
	by, reason, entry := s.person(ctx, "set", req.GetName(), 0, req.GetReason())
	out := &recoveryv1.SetProfileResponse{}
	p, list, err := contentOf(req)
	if err == nil && reason == "" {
		err = fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	if err == nil {
		err = s.verify(ctx, list)
	}
	if err == nil {
		entry.Details = map[string]any{"fingerprint": p.GetFingerprint()}
		var done *change
		done, err = s.book.do(ctx, by, reason, entry, func(ctx context.Context, c *change) error {
			if err := mayAnnounce(ctx, c, req); err != nil {
				return err
			}
			r, err := c.announce(ctx, p)
			if err != nil {
				return err
			}
			out.Profile, err = s.counted(ctx, c, r)
			return err
		})
		if err == nil {
			out.Pos = done.pos
		}
	}
	if err != nil {
		return nil, fmt.Errorf("set profile: %w", s.book.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
	}
	s.log(ctx, "profile announced", out.GetProfile(), by)
	return out, nil
}

// counted returns a version with the number of nodes that report it.
func (s *Server) counted(ctx context.Context, c *change, r *row) (*recoveryv1.ProfileVersion, error) {
	nodes, err := pg.Value[int64](ctx, c.tx, countReporting, r.ID)
	if err != nil {
		return nil, fmt.Errorf("count the nodes of a profile: %w", err)
	}
	out := r.proto(s.book.deps.Default)
	out.Nodes = nodes
	return out, nil
}

// mayAnnounce refuses a content of which the person saw another newest version, or that is one too many.
func mayAnnounce(ctx context.Context, c *change, req *recoveryv1.SetProfileRequest) error {
	if err := rollback.Refuse(ctx, c.tx); err != nil {
		return err
	}
	newest, err := pg.Value[int64](ctx, c.tx, readNewest, req.GetName())
	if err != nil && !pg.IsNoRows(err) {
		return fmt.Errorf("read the newest profile: %w", err)
	}
	if req.GetNewestSeen() != 0 && req.GetNewestSeen() != newest {
		return fault.New(commonv1.Reason_REASON_CONFLICT, "the profile has another version meanwhile",
			fault.Unmet(fmt.Sprintf("newest_seen: the newest version is %d", newest)))
	}
	valid, err := pg.Value[int64](ctx, c.tx, countValid)
	if err != nil {
		return fmt.Errorf("count profiles: %w", err)
	}
	if valid >= mostValid {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "there are too many valid versions of profiles",
			fault.Unmet(fmt.Sprintf("fewer than %d versions that are not retired", mostValid)),
			fault.Remedy("retire versions that no node reports: `gpuaas profiles list`"))
	}
	size, err := pg.Value[int64](ctx, c.tx, sumTrust, req.GetName())
	if err != nil {
		return fmt.Errorf("measure profiles: %w", err)
	}
	if size+int64(len(req.GetCaBundlePem())+len(req.GetRecoveryCaBundlePem())) > mostTrust {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the profiles have too many certificates",
			fault.Unmet(fmt.Sprintf("trust bundles of at most %d bytes in the active and announced versions", mostTrust)),
			fault.Remedy("set profiles with the roots alone that their endpoints need"))
	}
	return nil
}

func (s *Server) verify(ctx context.Context, list []endpoint) error {
	select {
	case s.verifying <- struct{}{}:
		defer func() { <-s.verifying }()
		return s.book.verify(ctx, list)
	case <-ctx.Done():
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "", fault.Cause(context.Cause(ctx)))
	}
}

// verifyAgain verifies the endpoints of a version that is to become active: what proved to be well when it was
// announced may be gone. A version that is active, or of which there is no such, is left to the change itself.
func (s *Server) verifyAgain(ctx context.Context, name string, number int64) error {
	r, err := pg.One[row](ctx, s.book.deps.Pool, readOfNumber, name, number)
	if pg.IsNoRows(err) || err == nil && r.Phase != announced && r.Phase != retiring {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read profile: %w", err)
	}
	_, list, err := contentOf(&recoveryv1.SetProfileRequest{
		Name: r.Name, ApiUrl: r.APIURL, RecoveryUrl: r.RecoveryURL, TerminalUrl: r.TerminalURL, CaBundlePem: r.CABundle,
		RecoveryCaBundlePem: r.RecoveryCABundle,
	})
	if err != nil {
		return err
	}
	return s.verify(ctx, list)
}

// ActivateProfile verifies the endpoints of a version that is announced or retiring, and makes it the active one.
func (s *Server) ActivateProfile(ctx context.Context, req *recoveryv1.ActivateProfileRequest) (
	*recoveryv1.ActivateProfileResponse, error,
) {
	by, reason, entry := s.person(ctx, "activate", req.GetName(), req.GetVersion(), req.GetReason())
	out := &recoveryv1.ActivateProfileResponse{}
	if reason != "" {
		if err := s.verifyAgain(ctx, req.GetName(), req.GetVersion()); err != nil {
			return nil, fmt.Errorf("activate profile: %w", s.book.deps.Audit.Refuse(ctx, entry, pg.Fault(err)))
		}
	}
	done, err := s.decide(ctx, by, reason, entry, func(ctx context.Context, c *change) error {
		r, err := c.find(ctx, req.GetName(), req.GetVersion(), req.GetRowSeen())
		if err != nil {
			return err
		}
		if r.Phase != announced && r.Phase != retiring && r.Phase != active {
			return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the version is "+r.Phase,
				fault.Remedy("set the same profile again, which verifies its endpoints and announces it"))
		}
		if err := c.activate(ctx, r); err != nil {
			return err
		}
		out.Profile, err = s.counted(ctx, c, r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("activate profile: %w", err)
	}
	out.Pos = done.pos
	s.log(ctx, "profile activated", out.GetProfile(), by)
	return out, nil
}

// RetireProfile ends a version that is not active.
func (s *Server) RetireProfile(ctx context.Context, req *recoveryv1.RetireProfileRequest) (
	*recoveryv1.RetireProfileResponse, error,
) {
	by, reason, entry := s.person(ctx, "retire", req.GetName(), req.GetVersion(), req.GetReason())
	entry.Details["force"] = req.GetForce()
	out := &recoveryv1.RetireProfileResponse{}
	done, err := s.decide(ctx, by, reason, entry, func(ctx context.Context, c *change) error {
		r, err := c.find(ctx, req.GetName(), req.GetVersion(), req.GetRowSeen())
		if err != nil {
			return err
		}
		if err := mayRetire(ctx, c, r, req.GetForce()); err != nil {
			return err
		}
		if r.Phase != retired {
			if err := c.enter(ctx, r, retired); err != nil {
				return err
			}
			if err := c.raise(ctx, r.Name, r); err != nil {
				return err
			}
		}
		out.Profile, err = s.counted(ctx, c, r)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("retire profile: %w", err)
	}
	out.Pos = done.pos
	s.log(ctx, "profile retired", out.GetProfile(), by)
	return out, nil
}

func mayRetire(ctx context.Context, c *change, r *row, force bool) error {
	if r.Phase == active {
		return fault.New(commonv1.Reason_REASON_PROFILE_IN_USE, "the version is active",
			fault.Unmet("nodes are given it as they enrol"),
			fault.Remedy("activate another version of the profile first"))
	}
	if r.Phase == retired || force {
		return nil
	}
	nodes, err := pg.Value[int64](ctx, c.tx, countReporting, r.ID)
	if err != nil {
		return fmt.Errorf("count the nodes of a profile: %w", err)
	}
	if nodes > 0 {
		return fault.New(commonv1.Reason_REASON_PROFILE_IN_USE, fmt.Sprintf("%d nodes report this version", nodes),
			fault.Remedy("wait until no node reports it (`gpuaas profiles list`); --force retires it all the same, and "+
				"these nodes drift then"))
	}
	return nil
}

// decide makes a change that a person has asked for, and records its refusal.
func (s *Server) decide(ctx context.Context, by, reason string, entry audit.Entry,
	fn func(ctx context.Context, c *change) error,
) (*change, error) {
	if reason == "" {
		return nil, s.book.deps.Audit.Refuse(ctx, entry, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, ""))
	}
	done, err := s.book.do(ctx, by, reason, entry, func(ctx context.Context, c *change) error {
		if err := rollback.Refuse(ctx, c.tx); err != nil {
			return err
		}
		return fn(ctx, c)
	})
	if err != nil {
		return nil, s.book.deps.Audit.Refuse(ctx, entry, pg.Fault(err))
	}
	return done, nil
}

func (s *Server) person(ctx context.Context, verb, name string, number int64, reason string) (string, string,
	audit.Entry,
) {
	by, reason := rpc.ActorFrom(ctx), strings.TrimSpace(reason)
	details := map[string]any{}
	if number != 0 {
		details["profile_version"] = number
	}
	return by, reason, audit.Entry{
		Action: "profile." + verb, Actor: by, Reason: reason, SubjectType: "profile", SubjectID: name, Details: details,
	}
}

func (s *Server) log(ctx context.Context, what string, v *recoveryv1.ProfileVersion, by string) {
	s.book.deps.Logger.InfoContext(ctx, "profile changed", slog.String("change", what),
		slog.String("profile", v.GetProfile().GetName()), slog.Int64("version", v.GetProfile().GetVersion()),
		slog.String("by", by))
}
