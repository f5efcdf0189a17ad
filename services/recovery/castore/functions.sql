-- A build replaces these functions if the schema's comment names an earlier version than its own. The functions that
-- read an end have theirs in their names, and so has an index: one is of no use after its function has changed.
-- Arguments and results of the functions that cut stay as they are, for builds of other versions call them. The first
-- version named no version, and a replica of it replaces cut_certificates, cut_tokens and cut_revocations whatever it
-- finds.
CREATE SCHEMA IF NOT EXISTS mesh_ca;
COMMENT ON SCHEMA mesh_ca IS 'retention of the mesh, version @version@';

-- The functions that read an end catch errors, which before Postgres 17 no parallel process may: an index of a large
-- table would fail.

-- When a certificate in DER ends; null if it cannot be read. Certificate and TBSCertificate are entered; version,
-- serial, algorithm and issuer are skipped; Validity is entered, notBefore is skipped, notAfter is read.
CREATE OR REPLACE FUNCTION mesh_ca.certificate_end_2(der bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    at   integer := 0;
    tag  integer;
    size integer;
    more integer;
    shown text;
BEGIN
    FOR step IN 1..9 LOOP
        tag := get_byte(der, at);
        size := get_byte(der, at + 1);
        at := at + 2;
        IF size > 127 THEN
            more := size - 128;
            size := 0;
            FOR i IN 1..more LOOP
                size := size * 256 + get_byte(der, at);
                at := at + 1;
            END LOOP;
        END IF;
        CASE
        WHEN step IN (1, 2, 7) THEN
            IF tag <> 48 THEN
                RETURN NULL;
            END IF;
        WHEN step = 3 AND tag <> 160 THEN
            at := at - 2; -- no version: this was the serial, of at most 20 bytes
        WHEN step < 9 THEN
            at := at + size;
        ELSE
            shown := encode(substring(der FROM at + 1 FOR size), 'escape');
            IF tag = 23 AND shown ~ '^[0-9]{12}Z$' THEN
                shown := CASE WHEN shown >= '5' THEN '19' ELSE '20' END || shown;
            ELSIF tag <> 24 OR shown !~ '^[0-9]{14}Z$' THEN
                RETURN NULL;
            END IF;
            RETURN make_timestamptz(substr(shown, 1, 4)::integer, substr(shown, 5, 2)::integer,
                substr(shown, 7, 2)::integer, substr(shown, 9, 2)::integer,
                substr(shown, 11, 2)::integer, substr(shown, 13, 2)::integer, 'UTC');
        END CASE;
    END LOOP;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- When a token ends, a JWT in its compact form; null if it cannot be read or does not end.
CREATE OR REPLACE FUNCTION mesh_ca.token_end_2(token bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    claims text := translate(split_part(encode(token, 'escape'), '.', 2), '-_', '+/');
BEGIN
    RETURN to_timestamp((convert_from(decode(rpad(claims, (length(claims) + 3) / 4 * 4, '='), 'base64'), 'UTF8')::jsonb
        ->> 'exp')::double precision);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- When what was revoked ends; null if that is not known.
CREATE OR REPLACE FUNCTION mesh_ca.revocation_end_2(info bytea) RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL UNSAFE AS $$
DECLARE
    ends text := convert_from(info, 'UTF8')::jsonb ->> 'ExpiresAt';
BEGIN
    -- The zero time of the program that writes it.
    RETURN CASE WHEN ends ~ '^000[01]-' THEN NULL ELSE ends::timestamptz END;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- The youngest that may be cut, whatever a caller says: what has ended by this server's clock, and for longer than the
-- authority takes a token whose time is over.
CREATE OR REPLACE FUNCTION mesh_ca.youngest(until timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE STRICT AS $$ SELECT least(until, now() - interval '10 minutes') $$;

CREATE OR REPLACE FUNCTION mesh_ca.cut_ended_certificates(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT c.nkey FROM @schema@.x509_certs c WHERE mesh_ca.certificate_end_2(c.nvalue) < mesh_ca.youngest(until)
        ORDER BY mesh_ca.certificate_end_2(c.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.x509_certs c USING over o WHERE c.nkey = o.nkey
            AND mesh_ca.certificate_end_2(c.nvalue) < mesh_ca.youngest(until) RETURNING c.nkey),
    data AS (DELETE FROM @schema@.x509_certs_data d USING gone g WHERE d.nkey = g.nkey)
    SELECT count(*) FROM gone
$$;

CREATE OR REPLACE FUNCTION mesh_ca.cut_ended_tokens(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT t.nkey FROM @schema@.used_ott t WHERE mesh_ca.token_end_2(t.nvalue) < mesh_ca.youngest(until)
        ORDER BY mesh_ca.token_end_2(t.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.used_ott t USING over o WHERE t.nkey = o.nkey
            AND mesh_ca.token_end_2(t.nvalue) < mesh_ca.youngest(until) RETURNING t.nkey)
    SELECT count(*) FROM gone
$$;

-- A revocation stays as long as its certificate is there and has not ended, whatever the revocation says. Each batch
-- reads anew those that stay so after their own end: the authority writes the end of the certificate into a revocation,
-- so they are those of a certificate that cannot be read, or of a row that a person wrote.
CREATE OR REPLACE FUNCTION mesh_ca.cut_ended_revocations(until timestamptz, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH over AS (
        SELECT r.nkey FROM @schema@.revoked_x509_certs r
        WHERE mesh_ca.revocation_end_2(r.nvalue) < mesh_ca.youngest(until)
            AND NOT EXISTS (SELECT FROM @schema@.x509_certs c WHERE c.nkey = r.nkey
                AND coalesce(mesh_ca.certificate_end_2(c.nvalue) >= mesh_ca.youngest(until), true))
        ORDER BY mesh_ca.revocation_end_2(r.nvalue) LIMIT most),
    gone AS (
        DELETE FROM @schema@.revoked_x509_certs r USING over o WHERE r.nkey = o.nkey
            AND mesh_ca.revocation_end_2(r.nvalue) < mesh_ca.youngest(until) RETURNING r.nkey)
    SELECT count(*) FROM gone
$$;
