package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/rpc"
)

var personView = view[*readmodelv1.Person]{
	name: (*readmodelv1.Person).GetName,
	columns: []column[*readmodelv1.Person]{
		{title: "NAME", path: "name"},
		{title: "STATE", path: "state"},
		{title: "ROLES", path: "roles"},
		{title: "TENANT", drop: 1, path: "tenant|tenant_id"},
		{title: "CREATED", drop: 4, path: "created_at"},
		{title: "EXPIRES", drop: 2, path: "expires_at"},
		{title: "ENDED", drop: 3, path: "ended_at"},
		{title: "ID", path: "person_id", wide: true},
		{title: "CREATED BY", path: "created_by", wide: true},
		{title: "ENDED BY", path: "ended_by", wide: true},
	},
}

func peopleCommand(p *Program) *cobra.Command {
	return group("people", "People who may call the mesh, their roles and their tokens", []string{"person"},
		peopleCreate(p), peopleList(p), peopleEnd(p))
}

func peopleCreate(p *Program) *cobra.Command {
	req := &readmodelv1.CreatePersonRequest{}
	var expires, contextName, out string
	cmd := &cobra.Command{
		Use:   "create NAME --role R",
		Short: "Make a person; the token goes into a context or a directory, and is printed nowhere",
		Long: "Make a person. The token is written, readable by you alone, into a context of your contexts file, or with --out into a\n" +
			"directory to hand over: contexts.yaml, ca.pem, token, and authorization, a header for curl and buf.\n" +
			"It is printed nowhere and the mesh keeps only its hash. A context of this mesh whose token is good no more gives way, as does that of the same\n" +
			"person when the request is repeated with its --idempotency-key; any other stays.\n" +
			"Roles: viewer reads; tenant reads and operates what is its tenant's; operator includes viewer and tenant, and operates\n" +
			"the fleet; security includes viewer, and decides about people and identities. You give only what your roles include:\n" +
			"a person of the role tenant is made by somebody who has operator besides security.",
		Example: "  gpuaas people create ana --role tenant --tenant acme --expires 7d\n" +
			"  gpuaas people create ci --role viewer --expires 30d --out ./ci",
		Args: args("NAME"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			if len(req.GetRoles()) == 0 {
				return Usage(errors.New("create needs --role, one of " + strings.Join(rpc.Roles(), ", ")))
			}
			req.Name = args[0]
			if expires != "" {
				life, err := parseLife(expires)
				if err != nil {
					return Usage(fmt.Errorf("--expires: %w", err))
				}
				req.ExpiresIn = durationpb.New(life)
			}
			place, err := placeFor(ctx, p, s, req, contextName, out)
			if err != nil {
				return err
			}
			answer, err := s.client.People.CreatePerson(ctx, req)
			if err != nil {
				return err
			}
			if err := place.write(s.target, answer.GetToken()); err != nil {
				return withdraw(ctx, s, answer.GetPerson(), err)
			}
			var beside []member
			if place.context != "" {
				beside = append(beside, with("context", place.context))
			}
			if place.dir != "" {
				beside = append(beside, with("out", place.dir))
			}
			if err := one(s.printer, personView, answer.GetPerson(), beside...); err != nil {
				return err
			}
			note(s.err, "%s", place.next(answer.GetPerson()))
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringSliceVar(
		&req.Roles,
		"role",
		nil,
		"what the person may do: "+strings.Join(rpc.Roles(), ", ")+"; more than once for more (required)",
	)
	flags.StringVar(
		&req.Tenant,
		"tenant",
		"",
		"tenant whose person it is: needed for the role tenant; binds the other roles to it",
	)
	flags.StringVar(&expires, "expires", "", "how long the token is good, from 5m to 30d (default 7d)")
	flags.StringVar(
		&contextName,
		"context-name",
		"",
		"name of the context (default: the current one's, a dash, and NAME)",
	)
	flags.StringVar(
		&req.IdempotencyKey,
		"idempotency-key",
		"",
		"the same request with the same `key` gets the same person, for a day, with a new token in the place of the last one",
	)
	flags.StringVar(&out, "out", "", "directory to write to instead of a context; it must not hold a token already")
	_ = cmd.RegisterFlagCompletionFunc("role", cobra.FixedCompletions(rpc.Roles(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.completeTenants)
	return cmd
}

// withdraw ends a new person whose token could not be written.
func withdraw(ctx context.Context, s *session, made *readmodelv1.Person, cause error) error {
	_, err := s.client.People.EndPerson(context.WithoutCancel(ctx), &readmodelv1.EndPersonRequest{
		Person: made.GetPersonId(), Reason: "the token could not be written",
	})
	if err != nil {
		return fmt.Errorf(
			"the token of %s could not be written and is lost; end the person with `gpuaas people end %s`: %w",
			made.GetName(),
			made.GetPersonId(),
			errors.Join(cause, err),
		)
	}
	return fmt.Errorf("the token of %s could not be written, so the person was ended again: %w", made.GetName(), cause)
}

// parseLife reads a duration that may be in days.
func parseLife(text string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%q is not a number of days such as 7d", text)
		}
		return time.Duration(n) * 24 * time.Hour, nil //nolint:gosec // at most 65535 days
	}
	life, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration such as 7d, 12h or 30m", text)
	}
	return life, nil
}

func peopleList(p *Program) *cobra.Command {
	var page paging
	var live bool
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List people with their roles; those that have ended stay for thirty days",
		Example: "  gpuaas people list --live\n  gpuaas people list -o wide",
		Args:    args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*readmodelv1.Person]{view: personView, fetch: people(s, live)})
		}),
	}
	page.flags(cmd)
	cmd.Flags().BoolVar(&live, "live", false, "only those who have neither expired nor been ended")
	return cmd
}

// people returns a function that reads a page of the people.
func people(s *session, live bool) func(context.Context, int32, string) ([]*readmodelv1.Person, string, error) {
	return func(ctx context.Context, size int32, token string) ([]*readmodelv1.Person, string, error) {
		answer, err := s.client.People.ListPeople(ctx,
			&readmodelv1.ListPeopleRequest{LiveOnly: live, PageSize: size, PageToken: token})
		return answer.GetItems(), answer.GetNextPageToken(), err
	}
}

func peopleEnd(p *Program) *cobra.Command {
	req := &readmodelv1.EndPersonRequest{}
	cmd := &cobra.Command{
		Use: "end PERSON", Short: "End a person: the token is good no more, and their watches end",
		Long: "End a person. PERSON is the name, the id, or six or more characters that one id begins or ends with.\n" +
			"Requests are refused from then on; watches end at once, or within two seconds where another replica serves them.\n" +
			"The person stays listed for thirty days; one who has been ended already stays as they are. A person with the role security is ended only if another\n" +
			"has it for a day more.",
		Example: "  gpuaas people end ana --reason 'left the team' --yes", Args: args("PERSON"),
		ValidArgsFunction: onlyFirst(completePeople(p)),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Person = args[0]
			found, err := findPerson(ctx, s, args[0])
			if err != nil && !s.sure { // with --yes the mesh resolves the reference itself
				return err
			}
			if found != nil {
				req.Person = found.GetPersonId()
			}
			if found.GetState() == readmodelv1.PersonState_PERSON_STATE_ENDED {
				note(s.err, "%s", alreadyEnded(found))
				return one(s.printer, personView, found)
			}
			name := cmp.Or(found.GetName(), args[0])
			err = s.confirmed(ctx, func(context.Context) (question, error) {
				return question{name: name, lost: []string{"The token of " + name +
					" will be good no more, and what uses it stops working. A new person gets a new token."}}, nil
			})
			if err != nil {
				return err
			}
			answer, err := s.client.People.EndPerson(ctx, req)
			if err != nil {
				return err
			}
			return one(s.printer, personView, answer.GetPerson())
		}),
	}
	reasonFlag(cmd, &req.Reason, false)
	return asks(cmd)
}

// alreadyEnded returns the text about when a person was ended, and by whom.
func alreadyEnded(p *readmodelv1.Person) string {
	return fmt.Sprintf("%s was ended already, at %s%s: nothing was changed", clean(p.GetName()),
		p.GetEndedAt().AsTime().UTC().Format(time.RFC3339),
		onlyIf(p.GetEndedBy() != "", " by "+clean(p.GetEndedBy())))
}

// findPerson returns a person as the mesh resolves a reference: by name, where a person who has not been ended takes
// precedence over the one who was ended last, or by six or more characters with which one id begins or ends. It returns
// nil if there is no such person, or more than one.
func findPerson(ctx context.Context, s *session, ref string) (*readmodelv1.Person, error) {
	all, _, err := pages(0, "", func(size int32, token string) ([]*readmodelv1.Person, string, error) {
		return people(s, false)(ctx, size, token)
	})
	if err != nil {
		return nil, err
	}
	var named *readmodelv1.Person
	var matching []*readmodelv1.Person
	part := strings.ReplaceAll(strings.ToLower(ref), "-", "")
	for _, p := range all {
		id := strings.ReplaceAll(p.GetPersonId(), "-", "")
		switch {
		case p.GetName() == strings.ToLower(ref):
			if p.GetState() != readmodelv1.PersonState_PERSON_STATE_ENDED {
				return p, nil
			}
			if named == nil || p.GetEndedAt().AsTime().After(named.GetEndedAt().AsTime()) {
				named = p
			}
		case len(part) >= 6 && (strings.HasPrefix(id, part) || strings.HasSuffix(id, part)):
			matching = append(matching, p)
		}
	}
	if named == nil && len(matching) == 1 {
		return matching[0], nil
	}
	return named, nil
}

// completePeople offers the people who have neither expired nor been ended.
func completePeople(p *Program) completer {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.complete(cmd, func(ctx context.Context, s *session) ([]string, error) {
			items, _, err := people(s, true)(ctx, 200, "")
			return namesOf(items, personView.name), err
		})
	}
}
