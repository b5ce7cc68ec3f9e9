// One dialog for every change: what will happen, as whom, and nothing before the second click.

import { useEffect, useRef, useState } from "preact/hooks";
import { useOperator } from "../session";

interface Question {
  /** What is to be done, as on its button: "Drain pd-0". */
  action: string;
  /** What that means. */
  text: string;
  run: () => Promise<unknown>;
}

let show: (question: Question) => void = () => undefined;

/** Ask before something is changed. */
export function ask(question: Question): void {
  show(question);
}

export function Confirm() {
  const [question, setQuestion] = useState<Question | null>(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const place = useRef<HTMLDialogElement>(null);
  const { mayChange, who } = useOperator();
  show = (next) => {
    setError("");
    setQuestion(next);
  };
  useEffect(() => {
    if (question) place.current?.showModal();
  }, [question]);
  const close = () => place.current?.close();
  const run = (event: SubmitEvent) => {
    event.preventDefault();
    setBusy(true);
    question!
      .run()
      .then(close)
      .catch((problem: Error) => setError(problem.message))
      .finally(() => setBusy(false));
  };
  if (!question) return null;
  return (
    <dialog ref={place} aria-labelledby="confirm-title" onClose={() => setQuestion(null)}>
      <form onSubmit={run}>
        <h2 id="confirm-title">{question.action}?</h2>
        <p>{question.text}</p>
        <p class="quiet">
          {mayChange ? `Recorded as done by ${who}.` : `As ${who} you may look and change nothing.`}
        </p>
        {error && (
          <p class="lost" role="alert">
            {error}
          </p>
        )}
        <p class="buttons">
          <button type="button" onClick={close}>
            Cancel
          </button>
          <button type="submit" class="first" disabled={isBusy || !mayChange}>
            {question.action}
          </button>
        </p>
      </form>
    </dialog>
  );
}
