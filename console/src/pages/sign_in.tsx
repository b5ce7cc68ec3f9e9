// Signing in: the key goes to the gateway once, which answers with a cookie that no script can read.

import { useState } from "preact/hooks";
import { post, type Session } from "../api";

interface Props {
  session: Session;
  onSignedIn: () => Promise<void>;
}

export function SignIn({ session, onSignedIn }: Props) {
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  if (!session.needs_key)
    return (
      <p class="lost">
        This gateway has no operator keys, and shows its console on its own machine alone. Create a key with{" "}
        <code>prfaas tenant key</code> and put its hash under <code>[operators.NAME]</code> in the deployment file.
      </p>
    );
  const send = (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const key = String(new FormData(form).get("key"));
    setBusy(true);
    post("api/session", { key })
      .then(onSignedIn)
      .catch((problem: Error) => {
        setError(problem.message);
        form.reset();
        form.querySelector("input")?.focus();
      })
      .finally(() => setBusy(false));
  };
  return (
    <form class="sign-in" onSubmit={send}>
      <h1>Sign in</h1>
      <label>
        Operator's key
        <input
          name="key"
          type="password"
          required
          autoFocus
          autocomplete="current-password"
          maxLength={512}
          aria-describedby="sign-in-note"
        />
      </label>
      {error && (
        <p class="lost" role="alert">
          {error}
        </p>
      )}
      <button type="submit" class="first" disabled={isBusy}>
        Sign in
      </button>
      <p class="quiet" id="sign-in-note">
        The key is sent once and kept nowhere in this browser. You stay signed in until you sign out, the browser is
        closed, the gateway restarts, or twelve hours are over.
      </p>
    </form>
  );
}
