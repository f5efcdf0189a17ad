package keyset

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

// Certificates are the certificate that a replica presents to its peers and the issuers that it trusts. Its Set follows
// the issuers of the kind Services with them: it trusts the issuers that its file reaches by cross certificates, until
// they are retired, and presents no certificate of an issuer that does not sign.
type Certificates struct {
	Store *pki.Store
	Roots *pki.Bundle
	// Changed is called with the issuers in the order in which they came, at first and after each change. It must not
	// block. It may be nil.
	Changed func(links []pki.RootLink)
}

// Prefixes of the entries about issuers in a replica's report.
const (
	trusts = "trust:" + string(Services)
	serves = "serve:" + string(Services)
)

// issuers is the state of a replica that follows the issuers of services.
type issuers struct {
	Certificates

	part *part
	seen []Key                 // the rows that are in force
	rows atomic.Pointer[[]Key] // the same, for goroutines that load files
}

func newIssuers(c *Certificates, service string) *issuers {
	if c == nil {
		return nil
	}
	i := &issuers{Certificates: *c, part: &part{Part: Part{Kind: Services, Signs: service == pg.RoleLifecycle}}}
	i.part.Outstanding = servedBy
	i.part.issuers = i
	return i
}

// links returns the rows as links of roots, and behind them the roots and cross certificates that only the file has.
func (i *issuers) links() []pki.RootLink {
	var out []pki.RootLink
	if rows := i.rows.Load(); rows != nil {
		for _, row := range *rows {
			out = append(out, pki.RootLink{DER: row.PublicKey, Cross: row.Endorsement, Retired: row.State == Retired})
		}
	}
	return out
}

// withFile adds the roots and cross certificates of the file.
func (i *issuers) withFile(links []pki.RootLink) []pki.RootLink {
	roots, crosses := i.Roots.Given()
	for _, root := range roots {
		link := pki.RootLink{DER: root.Raw}
		for _, cross := range crosses {
			if bytes.Equal(cross.RawSubjectPublicKeyInfo, root.RawSubjectPublicKeyInfo) {
				link.Cross = cross.Raw
			}
		}
		if !slices.ContainsFunc(links, func(l pki.RootLink) bool {
			return bytes.Equal(l.DER, root.Raw) && (len(l.Cross) > 0 || link.Cross == nil)
		}) {
			links = append(links, link)
		}
	}
	return links
}

// trusted returns the roots that are trusted if the file has the given ones: these and those that follow from them,
// without the retired ones. Of the set only those roots follow that are later than the newest given one that has
// signed: an operator removed the earlier ones from the file.
func (i *issuers) trusted(given []*x509.Certificate) []*x509.Certificate {
	links := i.links()
	listed := func(root *x509.Certificate) int {
		return slices.IndexFunc(links, func(l pki.RootLink) bool { return bytes.Equal(l.DER, root.Raw) })
	}
	after := 0
	if rows := i.rows.Load(); rows != nil {
		for _, root := range given {
			if at := listed(root); at >= after && (*rows)[at].State != VerifyOnly {
				after = at + 1
			}
		}
	}
	next := slices.DeleteFunc(pki.FollowRoots(given, links[after:]), func(root *x509.Certificate) bool {
		at := listed(root)
		return at >= 0 && links[at].Retired
	})
	if len(next) == 0 {
		return given // each is retired: a replica that trusts no root could not learn of another
	}
	return next
}

// crosses returns the cross certificates that are presented behind a chain.
func (i *issuers) crosses(chain []*x509.Certificate) [][]byte {
	root, err := pki.Anchor(chain, i.Roots.Roots())
	if err != nil {
		return nil
	}
	return pki.CrossChain(root, i.withFile(i.links()))
}

// admit refuses a certificate whose issuer does not sign yet, or has stopped signing, while the present certificate is
// good.
func (i *issuers) admit(chain []*x509.Certificate, present *x509.Certificate) error {
	rows := i.rows.Load()
	if rows == nil || len(*rows) == 0 || present == nil || time.Now().After(present.NotAfter) {
		return nil
	}
	root, err := pki.Anchor(chain, i.Roots.Roots())
	if err != nil {
		return err
	}
	switch row := rowOf(*rows, root); {
	case row == nil:
		return fmt.Errorf("its issuer %s is none of the mesh: `gpuaas keys rotate services` says how one becomes it",
			pki.RootID(root))
	case row.State == VerifyOnly:
		return fmt.Errorf("its issuer %s is not trusted by all yet", row.KeyID)
	case row.State == Retired:
		return fmt.Errorf("its issuer %s is retired", row.KeyID)
	}
	return nil
}

func rowOf(rows []Key, root *x509.Certificate) *Key {
	at := slices.IndexFunc(rows, func(row Key) bool { return bytes.Equal(row.PublicKey, root.Raw) })
	if at < 0 {
		return nil
	}
	return &rows[at]
}

// files returns a description of the files of certificates, which differs after a change of one.
func (i *issuers) files() string {
	if i == nil {
		return ""
	}
	return stamp(i.Store.Path()) + stamp(i.Roots.Path())
}

// follow applies rows.
func (i *issuers) follow(rows []Key) error {
	same := func(x, y Key) bool { return x.KeyID == y.KeyID && x.State == y.State }
	if i.rows.Load() != nil && slices.EqualFunc(rows, i.seen, same) {
		return nil
	}
	i.seen = rows
	i.rows.Store(&rows)
	if err := i.Roots.Follow(i.trusted); err != nil {
		return err
	}
	if i.Changed != nil {
		i.Changed(i.links())
	}
	return i.Store.Follow(i.crosses, i.admit)
}

// certificates does a round for the issuers of services, as the method one does for another kind.
func (s *Set) certificates(ctx context.Context, r roundOf) ([]string, []string, error) {
	i := s.issuers
	rows := ofKind(Services, r.rows)
	var problems []string
	bad := func(err error) {
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %s", Services, err))
		}
	}
	_, err := i.Roots.Reload()
	bad(err)
	var failed error
	if i.part.Signs && (s.due(i.part, rows, r.open) || i.unknown(rows)) {
		if changed, err := s.drive(ctx, i.part); err != nil {
			failed = err
		} else {
			rows = changed
		}
	}
	if err := i.follow(rows); err != nil {
		return nil, nil, fmt.Errorf("follow issuers of services: %w", err)
	}
	_, err = i.Store.Reload()
	bad(err)
	chain, err := i.Store.Chain()
	if err != nil {
		return nil, nil, err
	}
	differs, err := s.issuersDiffer(ctx, rows, chain)
	if err != nil {
		return nil, nil, err
	}
	if at := slices.IndexFunc(differs, func(d difference) bool { return !d.starts }); r.start && at >= 0 {
		return nil, nil, differ(i.part, differs[at])
	}
	for _, d := range differs {
		bad(errors.New(d.what))
	}
	var holds []string
	for _, root := range i.Roots.Roots() {
		holds = append(holds, trusts+":"+pki.RootID(root))
	}
	if root, err := pki.Anchor(chain, i.Roots.Roots()); err == nil {
		holds = append(holds, serves+":"+pki.RootID(root))
	}
	slices.Sort(holds)
	return holds, problems, failed
}

// unknown reports whether the file has a root that the set does not have.
func (i *issuers) unknown(rows []Key) bool {
	given, _ := i.Roots.Given()
	return slices.ContainsFunc(given, func(root *x509.Certificate) bool { return rowOf(rows, root) == nil })
}

// issuersDiffer lists how the replica's certificates differ from the set: an issuer whose certificates others present
// is not trusted here, or others would not trust its own issuer.
func (s *Set) issuersDiffer(ctx context.Context, rows []Key, chain []*x509.Certificate) ([]difference, error) {
	i := s.issuers
	if len(rows) == 0 {
		return nil, nil
	}
	roots := i.Roots.Roots()
	var out []difference
	for _, row := range rows {
		if row.State == Retired || slices.ContainsFunc(roots,
			func(root *x509.Certificate) bool { return bytes.Equal(root.Raw, row.PublicKey) }) {
			continue
		}
		by, err := servedBy(ctx, s.deps.Pool, row)
		if err != nil {
			return nil, err
		}
		if by != "" {
			out = append(out, difference{
				what: fmt.Sprintf("issuer %s is not trusted by %s; %s", row.KeyID, i.Roots.Path(), by),
				remedy: fmt.Sprintf("add the certificate of the issuer to %s, from the tls.ca_file of a replica that runs",
					i.Roots.Path()),
			})
		}
	}
	root, err := pki.Anchor(chain, roots)
	if err != nil {
		return append(out, difference{
			what: fmt.Sprintf("the certificate in %s is of no issuer that is trusted: %s", i.Store.Path(), err),
			remedy: fmt.Sprintf("replace %s by a certificate of the issuer that `gpuaas keys list` shows as signing",
				i.Store.Path()),
		}), nil
	}
	row := rowOf(rows, root)
	// With a cross certificate all replicas can verify the certificate that is presented.
	reached := len(i.crosses(chain)) > 0 || i.part.Signs
	switch {
	case row == nil && !reached:
		// Of two issuers that a mesh had before its set, the set has lifecycle's first, and this one once lifecycle's file
		// has it and a replica presents it.
		out = append(out, difference{
			what: fmt.Sprintf("the certificate in %s is of issuer %s, which the set does not have", i.Store.Path(),
				pki.RootID(root)),
			remedy: fmt.Sprintf("add the certificate of the issuer to the tls.ca_file of each service, or replace %s by a "+
				"certificate of the issuer that "+
				"`gpuaas keys list` shows as signing", i.Store.Path()),
			starts: true,
		})
	case row != nil && (row.State == Retired || row.State == VerifyOnly && !reached):
		by, err := servedBy(ctx, s.deps.Pool, *row)
		if err != nil {
			return nil, err
		}
		out = append(out, difference{
			what: fmt.Sprintf("the certificate in %s is of issuer %s, by which others do not verify", i.Store.Path(),
				row.KeyID),
			remedy: fmt.Sprintf("replace %s by a certificate of the issuer that `gpuaas keys list` shows as signing",
				i.Store.Path()),
			starts: row.State == VerifyOnly && by != "", // as replicas do that present one already
		})
	}
	return out, nil
}

// servedBy describes which live replicas present a certificate of an issuer.
func servedBy(ctx context.Context, q pg.Querier, key Key) (string, error) {
	live, err := pg.All[replica](ctx, q, readReplicas, liveFor.Seconds())
	if err != nil {
		return "", fmt.Errorf("read holders of keys: %w", err)
	}
	var names []string
	for _, r := range live {
		if slices.Contains(r.Holds, serves+":"+key.KeyID) {
			names = append(names, r.Service+" "+r.ReplicaID)
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	return "a certificate of it is shown by " + strings.Join(names, ", "), nil
}
