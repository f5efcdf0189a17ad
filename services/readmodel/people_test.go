package readmodel_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/readmodel/gateway/people"
)

func (k *kit) peopleOf(token string) readmodelv1connect.PeopleServiceClient {
	k.t.Helper()
	return readmodelv1connect.NewPeopleServiceClient(k.http(token, true), k.url())
}

// admitted creates a listed person without the API.
func (k *kit) admitted(name, tenantID string, roles ...string) string {
	k.t.Helper()
	return k.admittedFor(name, tenantID, time.Hour, roles...)
}

func (k *kit) admittedFor(name, tenantID string, life time.Duration, roles ...string) string {
	k.t.Helper()
	token, err := readmodel.AdmitPerson(testkit.Context(k.t), k.DB.Pool(pg.RoleReadmodel), readmodel.Admission{
		Name: name, TenantID: tenantID, Roles: roles, Life: life,
	})
	k.check(err)
	return token
}

func person(name, tenant string, roles ...string) *readmodelv1.CreatePersonRequest {
	return &readmodelv1.CreatePersonRequest{Name: name, Tenant: tenant, Roles: roles}
}

// Only a person with the role security and a role that includes another role may give that role.
func TestRolesAreGivenByThoseWhoHaveThem(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	const (
		given   = commonv1.Reason_REASON_UNSPECIFIED
		notHeld = commonv1.Reason_REASON_ROLE_NOT_HELD
		denied  = commonv1.Reason_REASON_PERMISSION_DENIED
		invalid = commonv1.Reason_REASON_INVALID_ARGUMENT
		unknown = commonv1.Reason_REASON_TENANT_UNKNOWN
	)
	givers := map[string]string{
		"both": k.admitted("both", "", "operator", "security"), "security": k.admitted("security", "", "security"),
		"operator": k.admitted("operator", "", "operator"), "viewer": k.admitted("viewer", "", "viewer"),
		"tenant": k.admitted("tenant", k.A.ID, "tenant"), "bound": k.admitted("bound", k.A.ID, "security", "operator"),
	}
	tests := []struct {
		giver, tenant string
		roles         []string
		want          commonv1.Reason
	}{
		{"both", "", []string{"viewer"}, given},
		{"both", "", []string{"operator"}, given},
		{"both", "", []string{"security", "operator"}, given},
		{"both", "alpha", []string{"tenant"}, given},
		{"both", k.B.ID, []string{"tenant"}, given},
		{"both", "alpha", []string{"viewer"}, given},
		{"both", "", []string{"tenant"}, invalid},
		{"both", "nowhere", []string{"tenant"}, unknown},
		{"both", "", []string{"root"}, invalid},
		{"both", "", nil, invalid},
		{"both", "", []string{"viewer", "viewer"}, invalid},
		{"security", "", []string{"viewer"}, given},
		{"security", "", []string{"security"}, given},
		{"security", "", []string{"operator"}, notHeld},
		{"security", "", []string{"viewer", "operator"}, notHeld},
		{"security", "alpha", []string{"tenant"}, notHeld},
		{"operator", "", []string{"viewer"}, denied},
		{"viewer", "", []string{"viewer"}, denied},
		{"tenant", "alpha", []string{"tenant"}, denied},
		{"bound", "alpha", []string{"tenant"}, denied},
		{"bound", "", []string{"viewer"}, denied},
	}
	audited := 0
	for i, tt := range tests {
		answer, err := k.peopleOf(
			givers[tt.giver],
		).CreatePerson(
			ctx,
			person(fmt.Sprintf("p%d", i), tt.tenant, tt.roles...),
		)
		if got := rpctest.ReasonOfWire(err); got != tt.want {
			t.Errorf("%s gives %v of %q: %v, want %s", tt.giver, tt.roles, tt.tenant, err, tt.want)
			continue
		}
		switch tt.want { // the others are slips
		case notHeld, denied:
			audited++
		case given:
			audited++
			me, err := k.query(answer.GetToken()).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
			want := slices.Sorted(slices.Values(tt.roles))
			if err != nil || me.GetSubject() != answer.GetPerson().GetName() || !slices.Equal(me.GetRoles(), want) ||
				me.GetTenantId() != answer.GetPerson().GetTenantId() || answer.GetPerson().GetCreatedBy() != tt.giver {
				t.Errorf("%s made %v, who is %v, %v", tt.giver, answer.GetPerson(), me, err)
			}
		}
	}
	made := auditOf(t, k, audited+len(givers), &readmodelv1.ListAuditRequest{Action: "person.create", PageSize: 200})
	outcomes := map[string]int{}
	for _, e := range made {
		outcomes[e.GetOutcome()]++
		if e.GetSubjectType() != "person" || e.GetSubjectId() == "" {
			t.Errorf("entry: %v", e)
		}
	}
	if outcomes[audit.Refused] != 8 || outcomes[audit.Done] != 8+len(givers) {
		t.Errorf("entries: %v", outcomes)
	}
}

// A role includes another one exactly if every method that admits the other admits it as well.
func TestIncludedRolesAreAdmittedWhereverTheirsAre(t *testing.T) {
	k := newKit(t)
	walked := 0
	for _, p := range policies(t, k) {
		for _, role := range rpc.Roles() {
			for _, included := range people.Includes(role) {
				walked++
				if slices.Contains(p.Roles, included) && !slices.Contains(p.Roles, role) {
					t.Errorf("%s admits %s and not %s, which includes it", p.Procedure, included, role)
				}
			}
		}
	}
	if walked < 200 {
		t.Errorf("%d combinations", walked)
	}
}

// TestALostAnswerIsAskedForAgain: the same request with the same key creates no second person; its token is valid, and
// the lost one is not.
func TestALostAnswerIsAskedForAgain(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	people := k.peopleOf(k.admittedFor("root", "", 30*time.Hour, "operator", "security"))
	good := func(token string) bool {
		_, err := k.query(token).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
		return err == nil
	}
	req := person("robot", "alpha", "tenant")
	req.IdempotencyKey = "robot-1"
	first, err := people.CreatePerson(ctx, req)
	k.check(err)
	again, err := people.CreatePerson(ctx, req)
	k.check(err)
	if again.GetPerson().GetPersonId() != first.GetPerson().GetPersonId() || again.GetToken() == first.GetToken() {
		t.Errorf("again: %v after %v", again.GetPerson(), first.GetPerson())
	}
	if good(first.GetToken()) || !good(again.GetToken()) {
		t.Errorf("the lost token is good: %t; the new one: %t", good(first.GetToken()), good(again.GetToken()))
	}
	says := func(token string) string {
		_, err := k.query(token).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{})
		refusal := fault.From(fault.FromConnect(err))
		return refusal.Public + "; " + refusal.Remedy
	}
	const replaced = "your token was replaced by a newer one at 2"
	if got := says(first.GetToken()); !strings.HasPrefix(got, replaced) || !strings.Contains(got, "use the newer token") {
		t.Errorf("the lost token: %s", got)
	}
	// A caller with the id of a session and not its secret does not learn that it was replaced.
	id, secret := strings.SplitN(first.GetToken(), "_", 3), strings.SplitN(again.GetToken(), "_", 3)
	if got := says(id[0] + "_" + id[1] + "_" + secret[2]); !strings.HasPrefix(got,
		"the token is unknown, expired or ended") {
		t.Errorf("the id of the lost token with another secret: %s", got)
	}
	refused := func(
		what string, by readmodelv1connect.PeopleServiceClient, want commonv1.Reason,
		edit func(*readmodelv1.CreatePersonRequest),
	) {
		t.Helper()
		other := person("robot", "alpha", "tenant")
		other.IdempotencyKey = "robot-1"
		edit(other)
		if _, err := by.CreatePerson(ctx, other); rpctest.ReasonOfWire(err) != want {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
		if !good(again.GetToken()) {
			t.Fatalf("%s: the token is good no more", what)
		}
	}
	const reused = commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED
	refused("another name", people, reused, func(r *readmodelv1.CreatePersonRequest) { r.Name = "other" })
	refused("other roles", people, reused,
		func(r *readmodelv1.CreatePersonRequest) { r.Roles = []string{"viewer", "tenant"} })
	refused("another tenant", people, reused, func(r *readmodelv1.CreatePersonRequest) { r.Tenant = "beta" })
	refused("another life", people, reused,
		func(r *readmodelv1.CreatePersonRequest) { r.ExpiresIn = durationpb.New(time.Hour) })
	refused("no key", people, commonv1.Reason_REASON_ALREADY_EXISTS,
		func(r *readmodelv1.CreatePersonRequest) { r.IdempotencyKey = "" })
	others := k.peopleOf(k.admitted("other-root", "", "operator", "security"))
	refused("another giver", others, commonv1.Reason_REASON_ALREADY_EXISTS, func(*readmodelv1.CreatePersonRequest) {})
	// Concurrent requests create one person, and one of the tokens is valid.
	at := person("once", "alpha", "tenant")
	at.IdempotencyKey = "once-1"
	answers := make(chan *readmodelv1.CreatePersonResponse, 4)
	for range cap(answers) {
		go func() {
			answer, err := people.CreatePerson(ctx, at)
			if err != nil {
				t.Errorf("at once: %v", err)
			}
			answers <- answer
		}()
	}
	made, given, tokens := map[string]bool{}, []string{}, 0
	for range cap(answers) {
		answer := <-answers
		made[answer.GetPerson().GetPersonId()] = true
		given = append(given, answer.GetToken())
	}
	for _, token := range given {
		if good(token) {
			tokens++
		}
	}
	if len(made) != 1 || tokens != 1 {
		t.Errorf("%d people were made at once, and %d tokens are good", len(made), tokens)
	}
	_, err = people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "once"})
	k.check(err)
	if _, err := people.CreatePerson(ctx, at); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_PRECONDITION_FAILED {
		t.Errorf("a person who was ended: %v", err)
	}
	// A request that is repeated after a day does not end a token that is in use.
	testkit.SetClockOffset(k.DB, 25*time.Hour)
	refused("after a day", people, commonv1.Reason_REASON_PRECONDITION_FAILED, func(*readmodelv1.CreatePersonRequest) {})
}

func TestPeopleAreNamedOnceAndExpire(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	people := k.peopleOf(k.admitted("root", "", "operator", "security"))
	create := func(req *readmodelv1.CreatePersonRequest) (*readmodelv1.CreatePersonResponse, commonv1.Reason) {
		answer, err := people.CreatePerson(ctx, req)
		return answer, rpctest.ReasonOfWire(err)
	}
	for name, life := range map[string]time.Duration{
		"too-short": time.Minute, "too-long": 31 * 24 * time.Hour,
		"past": -time.Hour,
	} {
		req := person(name, "", "viewer")
		req.ExpiresIn = durationpb.New(life)
		if _, got := create(req); got != commonv1.Reason_REASON_INVALID_ARGUMENT {
			t.Errorf("%s: %s", name, got)
		}
	}
	for _, name := range []string{"", "Ana", "ana maria", "-ana", "ana/x", strings.Repeat("a", 64), ids.New()} {
		if _, got := create(person(name, "", "viewer")); got != commonv1.Reason_REASON_INVALID_ARGUMENT {
			t.Errorf("the name %q: %s", name, got)
		}
	}
	req := person("ana@example.org", "", "viewer")
	req.ExpiresIn = durationpb.New(2 * time.Hour)
	ana, got := create(req)
	if got != commonv1.Reason_REASON_UNSPECIFIED {
		t.Fatal(got)
	}
	if lives := ana.GetPerson().GetExpiresAt().AsTime().Sub(
		ana.GetPerson().GetCreatedAt().AsTime(),
	); lives < 2*time.Hour ||
		lives > 2*time.Hour+time.Minute {
		t.Errorf("lives %s", lives)
	}
	if _, got := create(req); got != commonv1.Reason_REASON_ALREADY_EXISTS {
		t.Errorf("the same name: %s", got)
	}
	const days = 7 * 24 * time.Hour
	week, _ := create(person("week", "", "viewer"))
	if lives := week.GetPerson().GetExpiresAt().AsTime().Sub(
		week.GetPerson().GetCreatedAt().AsTime(),
	); lives < days ||
		lives > days+time.Minute {
		t.Errorf("lives %s by default", lives)
	}
	// Sessions expire by the database's clock, so the caller gets a new one before the clock moves on.
	people = k.peopleOf(k.token("", "operator", "security"))
	testkit.SetClockOffset(k.DB, 59*time.Minute)
	if _, err := k.query(ana.GetToken()).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{}); err != nil {
		t.Error(err)
	}
	testkit.SetClockOffset(k.DB, 2*time.Hour+time.Minute)
	people = k.peopleOf(k.tokenOf("second", "", "operator", "security"))
	if _, err := k.query(
		ana.GetToken(),
	).WhoAmI(
		ctx,
		&readmodelv1.WhoAmIRequest{},
	); rpctest.ReasonOfWire(
		err,
	) != commonv1.Reason_REASON_UNAUTHENTICATED {
		t.Errorf("expired: %v", err)
	}
	list, err := people.ListPeople(ctx, &readmodelv1.ListPeopleRequest{})
	if err != nil || stateOf(list.GetItems(), ana.GetPerson()) != readmodelv1.PersonState_PERSON_STATE_EXPIRED {
		t.Errorf("%v, %v", list, err)
	}
	again, got := create(person("ana@example.org", "", "viewer"))
	if got != commonv1.Reason_REASON_UNSPECIFIED || again.GetPerson().GetPersonId() == ana.GetPerson().GetPersonId() {
		t.Errorf("the name of one that expired: %s", got)
	}
	list, err = people.ListPeople(ctx, &readmodelv1.ListPeopleRequest{LiveOnly: true})
	if err != nil || len(list.GetItems()) != 2 {
		t.Errorf("live: %v, %v", list, err)
	}
	var seen []string
	for token := ""; ; {
		page, err := people.ListPeople(ctx, &readmodelv1.ListPeopleRequest{PageSize: 1, PageToken: token})
		k.check(err)
		for _, p := range page.GetItems() {
			seen = append(seen, p.GetName())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	if !slices.Equal(seen, []string{"ana@example.org", "week", "ana@example.org", "root"}) {
		t.Errorf("pages: %v", seen)
	}
	if _, err := people.ListPeople(
		ctx,
		&readmodelv1.ListPeopleRequest{PageToken: "x"},
	); rpctest.ReasonOfWire(
		err,
	) != commonv1.Reason_REASON_INVALID_ARGUMENT {
		t.Errorf("a forged token: %v", err)
	}
	// Thirty days after their end no row of the people is left.
	testkit.SetClockOffset(k.DB, 33*24*time.Hour)
	k.check(k.service.Sessions().Sweep(ctx))
	list, err = k.peopleOf(k.tokenOf("third", "", "security")).ListPeople(ctx, &readmodelv1.ListPeopleRequest{})
	if err != nil || len(list.GetItems()) != 2 {
		t.Errorf("after the sweep: %v, %v", list, err)
	}
}

func stateOf(items []*readmodelv1.Person, p *readmodelv1.Person) readmodelv1.PersonState {
	for _, i := range items {
		if i.GetPersonId() == p.GetPersonId() {
			return i.GetState()
		}
	}
	return readmodelv1.PersonState_PERSON_STATE_UNSPECIFIED
}

// The end of a person ends calls and watches at once, on this replica without waiting for the next check of the
// session.
func TestTheEndOfAPersonEndsTheirWatches(t *testing.T) {
	k := newKit(t)
	ctx, cancel := context.WithTimeout(testkit.Context(t), 2*time.Minute)
	defer cancel()
	people := k.peopleOf(k.admitted("root", "", "operator", "security"))
	bob, err := people.CreatePerson(ctx, person("bob", "alpha", "tenant"))
	k.check(err)
	bystander, err := k.openWatch(k.admitted("bystander", "", "viewer"))
	k.check(err)
	defer bystander()
	stream, err := k.query(
		bob.GetToken(),
	).Watch(
		ctx,
		&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}},
	)
	k.check(err)
	defer stream.Close()
	for stream.Receive() {
		if w := stream.Msg().GetItem().GetWorkspace(); w != nil && w.GetTenantId() != k.A.ID {
			t.Errorf("another tenant's workspace: %v", w)
		}
		if stream.Msg().GetBootstrapped() != nil {
			ended, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "bob", Reason: "left"})
			k.check(err)
			if p := ended.GetPerson(); p.GetState() != readmodelv1.PersonState_PERSON_STATE_ENDED ||
				p.GetEndedBy() != "root" ||
				p.GetEndedAt() == nil {
				t.Errorf("ended: %v", p)
			}
		}
	}
	if rpctest.ReasonOfWire(stream.Err()) != commonv1.Reason_REASON_UNAUTHENTICATED {
		t.Errorf("the watch ended with %v", stream.Err())
	}
	if _, err := k.query(
		bob.GetToken(),
	).WhoAmI(
		ctx,
		&readmodelv1.WhoAmIRequest{},
	); rpctest.ReasonOfWire(
		err,
	) != commonv1.Reason_REASON_UNAUTHENTICATED {
		t.Errorf("after the end: %v", err)
	}
	// By id and by name it can be ended again and stays as it is; the name is free.
	for _, ref := range []string{bob.GetPerson().GetPersonId(), "bob"} {
		again, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: ref})
		if err != nil || again.GetPerson().GetEndedBy() != "root" ||
			again.GetPerson().GetPersonId() != bob.GetPerson().GetPersonId() {
			t.Errorf("%s ended again: %v, %v", ref, again, err)
		}
	}
	second, err := people.CreatePerson(ctx, person("bob", "beta", "tenant"))
	k.check(err)
	id := second.GetPerson().GetPersonId()
	if _, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: id[len(id)-8:]}); err != nil {
		t.Errorf("by the end of the id: %v", err)
	}
	entries := auditOf(t, k, 2, &readmodelv1.ListAuditRequest{Action: "person.end"})
	if len(entries) != 2 || entries[1].GetActor() != "root" || entries[1].GetReason() != "left" ||
		entries[1].GetSubjectId() != "bob" {
		t.Errorf("entries: %v", entries)
	}
}

// The last person with the role security stays, even if two end each other at the same time.
func TestTheLastSecurityPersonStays(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	const last = commonv1.Reason_REASON_LAST_SECURITY_PERSON
	root := k.peopleOf(k.admittedFor("root", "", 48*time.Hour, "operator", "security"))
	k.admitted("bound", k.A.ID, "security") // of a tenant: calls nothing of this
	if _, err := root.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "root"}); rpctest.ReasonOfWire(err) != last {
		t.Fatalf("the last one: %v", err)
	}
	if entries := auditOf(
		t,
		k,
		1,
		&readmodelv1.ListAuditRequest{Action: "person.end"},
	); entries[0].GetOutcome() != audit.Refused ||
		entries[0].GetSubjectId() != "root" {
		t.Errorf("entry: %v", entries)
	}
	second, err := root.CreatePerson(ctx, person("second", "", "security"))
	k.check(err)
	pair := map[string]readmodelv1connect.PeopleServiceClient{"second": root, "root": k.peopleOf(second.GetToken())}
	var wg sync.WaitGroup
	var mu sync.Mutex
	refused, ended := 0, 0
	for name, people := range pair {
		wg.Go(func() {
			_, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: name})
			mu.Lock()
			defer mu.Unlock()
			switch got := rpctest.ReasonOfWire(err); got { // the others are wrong
			case commonv1.Reason_REASON_UNSPECIFIED:
				ended++
			case last, commonv1.Reason_REASON_UNAUTHENTICATED: // the person of the second call had been ended by the first
				refused++
			default:
				t.Errorf("ending %s: %v", name, err)
			}
		})
	}
	wg.Wait()
	if ended != 1 || refused != 1 {
		t.Errorf("%d ended, %d refused", ended, refused)
	}
	var live int
	k.check(
		k.DB.Pool(
			pg.RoleReadmodel,
		).QueryRow(
			ctx,
			`SELECT count(*) FROM readmodel.person WHERE ended_at IS NULL AND tenant_id IS NULL
		AND 'security' = ANY (roles)`,
		).Scan(
			&live,
		),
	)
	if live != 1 {
		t.Errorf("%d live people with the role security", live)
	}
}

// A reference to a person works as for every other object: a part of the id in any spelling, and an error that lists
// the candidates if it is ambiguous.
func TestPeopleAreNamedLikeOtherObjects(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	people := k.peopleOf(k.admittedFor("root", "", 48*time.Hour, "operator", "security"))
	byName := map[string]string{}
	for _, name := range []string{"ana", "bob", "carol", "dave", "erin"} {
		made, err := people.CreatePerson(ctx, person(name, "", "viewer"))
		k.check(err)
		byName[name] = made.GetPerson().GetPersonId()
	}
	undashed := func(name string) string { return strings.ReplaceAll(byName[name], "-", "") }
	const ends = "0f0f0f"
	// Two people whose ids begin alike and end alike.
	pool := k.DB.Pool(pg.RoleReadmodel)
	for id, name := range map[string]string{
		"ffffffff-ffff-7fff-8000-0000000f0f0f": "fay",
		"ffffffff-ffff-7fff-8001-0000000f0f0f": "gus",
	} {
		_, err := pool.Exec(ctx, `INSERT INTO readmodel.person (person_id, name, roles, created_by, expires_at)
			VALUES ($1::uuid, $2, '{viewer}', '', mesh.clock() + interval '1 day')`, id, name)
		k.check(err)
	}
	end := func(ref string) (*readmodelv1.EndPersonResponse, error) {
		return people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: ref})
	}
	for name, ref := range map[string]string{
		"ana": undashed("ana")[:30], "bob": undashed("bob")[16:], "carol": strings.ToUpper(undashed("carol")),
		"dave": byName["dave"][19:], "erin": byName["erin"],
	} {
		if got, err := end(ref); err != nil || got.GetPerson().GetName() != name {
			t.Errorf("%s by %s: %v, %v", name, ref, got, err)
		}
	}
	for _, ref := range []string{"fffffff", "ffffffffffff", "ffffffff-ffff-7f", ends} {
		_, err := end(ref)
		d := fault.From(fault.FromConnect(err))
		if d.Reason != commonv1.Reason_REASON_AMBIGUOUS || !slices.Equal(d.Unmet, []string{
			"person ffffffff-ffff-7fff-8000-0000000f0f0f fay", "person ffffffff-ffff-7fff-8001-0000000f0f0f gus",
		}) {
			t.Errorf("%s: %v %v", ref, err, d.Unmet)
		}
	}
	for _, ref := range []string{"urn:uuid:" + byName["ana"], "{" + byName["ana"] + "}", ids.New(), "nobody", "fffff"} {
		if _, err := end(ref); rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_NOT_FOUND {
			t.Errorf("%s: %v", ref, err)
		}
	}
	for _, token := range []string{"urn:uuid:" + byName["ana"], "{" + byName["ana"] + "}"} {
		_, err := people.ListPeople(ctx, &readmodelv1.ListPeopleRequest{PageToken: token})
		if rpctest.ReasonOfWire(err) != commonv1.Reason_REASON_INVALID_ARGUMENT {
			t.Errorf("the page token %s: %v", token, err)
		}
	}
}

// Ending a person who was ended already, by name, returns the first end and changes nothing.
func TestAPersonMayBeEndedTwice(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	people := k.peopleOf(k.admittedFor("root", "", 48*time.Hour, "operator", "security"))
	ana, err := people.CreatePerson(ctx, person("ana", "", "viewer"))
	k.check(err)
	first, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "ana"})
	k.check(err)
	testkit.SetClockOffset(k.DB, time.Hour)
	people = k.peopleOf(k.tokenOf("second", "", "operator", "security"))
	again, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "ana"})
	if err != nil || !again.GetPerson().GetEndedAt().AsTime().Equal(first.GetPerson().GetEndedAt().AsTime()) ||
		again.GetPerson().GetEndedBy() != "root" {
		t.Errorf("ended again: %v, %v; was %v", again, err, first)
	}
	// A name means the person who has it now before one who had it earlier.
	heir, err := people.CreatePerson(ctx, person("ana", "", "viewer"))
	k.check(err)
	got, err := people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "ana"})
	if err != nil || got.GetPerson().GetPersonId() != heir.GetPerson().GetPersonId() ||
		heir.GetPerson().GetPersonId() == ana.GetPerson().GetPersonId() {
		t.Errorf("the heir: %v, %v", got, err)
	}
	testkit.SetClockOffset(k.DB, 2*time.Hour)
	people = k.peopleOf(k.tokenOf("third", "", "operator", "security"))
	if got, err = people.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "ana"}); err != nil ||
		got.GetPerson().GetPersonId() != heir.GetPerson().GetPersonId() {
		t.Errorf("the one who was ended last: %v, %v", got, err)
	}
}

// A person with the role security who expires in less than a day does not count as the one who remains.
func TestASecurityPersonOfADayRemains(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	root := k.peopleOf(k.admittedFor("root", "", 48*time.Hour, "operator", "security"))
	short := person("short", "", "security")
	short.ExpiresIn = durationpb.New(5 * time.Minute)
	_, err := root.CreatePerson(ctx, short)
	k.check(err)
	_, err = root.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "root"})
	d := fault.From(fault.FromConnect(err))
	if d == nil || d.Reason != commonv1.Reason_REASON_LAST_SECURITY_PERSON ||
		!strings.Contains(strings.Join(d.Unmet, " "), "24h") {
		t.Errorf("one of five minutes remains: %v", err)
	}
	if _, err := root.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "short"}); err != nil {
		t.Errorf("the one of five minutes: %v", err)
	}
	_, err = root.CreatePerson(ctx, person("long", "", "security"))
	k.check(err)
	if _, err := root.EndPerson(ctx, &readmodelv1.EndPersonRequest{Person: "root"}); err != nil {
		t.Errorf("one of seven days remains: %v", err)
	}
}
