-- +goose Up

-- People who may call the API. A row stays for thirty days after its end; sessions are deleted a week after theirs.
CREATE TABLE readmodel.person (
    person_id  uuid        PRIMARY KEY,
    name       text        NOT NULL CHECK (name <> ''),
    tenant_id  uuid,
    roles      text[]      NOT NULL CHECK (cardinality(roles) > 0), -- sorted
    created_at timestamptz NOT NULL DEFAULT mesh.clock(),
    created_by text        NOT NULL DEFAULT '',
    expires_at timestamptz NOT NULL,
    ended_at   timestamptz, -- also set, to expires_at, when the name of an expired person is given again
    ended_by   text        NOT NULL DEFAULT '',
    CHECK (tenant_id IS NOT NULL OR NOT ('tenant' = ANY (roles)))
);
CREATE UNIQUE INDEX person_live_name ON readmodel.person (name) WHERE ended_at IS NULL;
CREATE INDEX person_over ON readmodel.person (LEAST(ended_at, expires_at));

ALTER TABLE readmodel.person_session ADD COLUMN person_id uuid REFERENCES readmodel.person ON DELETE CASCADE;
CREATE INDEX person_session_by_person ON readmodel.person_session (person_id) WHERE person_id IS NOT NULL;

-- Whoever has a session now is a person. Where the sessions of one subject differ in their rights, the newest one's are those of the person.
INSERT INTO readmodel.person (person_id, name, tenant_id, roles, created_at, expires_at)
SELECT DISTINCT ON (s.subject) s.session_id, s.subject, s.tenant_id, ARRAY(SELECT unnest(s.roles) ORDER BY 1), s.created_at, s.expires_at
FROM readmodel.person_session s WHERE s.revoked_at IS NULL AND s.expires_at > mesh.clock()
ORDER BY s.subject, s.created_at DESC, s.session_id DESC;
UPDATE readmodel.person_session s SET person_id = p.person_id
FROM readmodel.person p WHERE p.name = s.subject AND s.revoked_at IS NULL AND s.expires_at > mesh.clock();

-- +goose Down
ALTER TABLE readmodel.person_session DROP COLUMN person_id;
DROP TABLE readmodel.person;
