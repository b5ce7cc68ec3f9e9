// The page: five pictures, each with its question and its answer.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { unpack, type Data } from "./data";
import { Many } from "./many";
import { Now } from "./now";
import { Trouble } from "./trouble";
import { TwoWays } from "./two_ways";
import { Yours } from "./yours";

const isServed = location.protocol.startsWith("http") && location.pathname.endsWith("/console/learn.html");

export function Page() {
  const [data, setData] = useState<Data | null>(null);
  useEffect(() => void unpack().then(setData), []);
  return (
    <>
      <header>
        <a class={isServed ? "brand back" : "brand"} href={isServed ? "./" : "#top"}>
          {isServed ? "← Console" : "prfaas"}
        </a>
        <nav aria-label="Parts">
          {["One prompt", "Many", "Break it", "Your numbers", "Now"].map((name, i) => (
            <a href={`#part-${i + 1}`}>{name}</a>
          ))}
        </nav>
        <Theme />
      </header>
      <main id="top">
        <section class="opening">
          <div>
          <p class="kicker">Prefill-as-a-Service, explained in five pictures</p>
          <h1>Read long prompts far away. Write every answer at home.</h1>
          <p class="lead">
            A chatbot answers in two steps. First its model <b class="there">reads</b> the prompt: your question and
            all that goes with it. That is heavy computing (<i>prefill</i>). Then it <b class="write">writes</b> the
            answer word by word, which is light computing with much memory (<i>decode</i>). Between the two lie its
            notes on what it has read (<i>KV cache</i>).
          </p>
          <p class="lead">
            In some new models these notes are short enough to be sent to another city (<i>hybrid</i> models; with the
            others, <i>dense</i> ones, they are too long). So a remote site with faster machines can read for you.
            Should it? That depends on the prompt.
          </p>
          <p class="terms">
            Lengths are in <i>tokens</i>: 1,000 tokens are about a page and a half. A line's
            speed is in <i>Gbit/s</i>: 1 carries 125 MB a second, as much as 40 photos. <span class="here">Orange</span> is
            read here, at your site; <span class="there">blue</span> is read there, at the remote site.
          </p>
          </div>
          <nav class="questions" aria-label="Questions">
            <p>In three minutes you will know</p>
            <ol>
              <li>
                <a href="#part-1">why long prompts go,</a>
              </li>
              <li>
                <a href="#part-1">why short ones stay,</a>
              </li>
              <li>
                <a href="#part-2">what a lower threshold does,</a>
              </li>
              <li>
                <a href="#part-3">what happens when the line dies.</a>
              </li>
            </ol>
          </nav>
        </section>
        <Part number={1} title="One prompt, two ways">
          <p>
            One prompt, nobody else waiting. Here it is read and answered on the same site. There it is read on faster
            machines, and its notes come back over the line in blocks, each while the next is still being read.{" "}
            <b>Drag the length</b>, then try a dense model.
          </p>
          {data ? <TwoWays data={data.one} /> : <Loading />}
          <Answer question="Why do long prompts go?">
            Reading takes longer with every token, so the faster machines save more the longer a prompt is. Its notes
            travel while reading goes on, so the trip adds little at the end.
          </Answer>
          <Answer question="Why do short prompts stay?">
            Every trip has a fixed price: the distance, and 182 MB of notes however short the prompt, because most layers
            of a hybrid keep a summary of the same size for one page as for a hundred. A short prompt saves less than
            that. And the few fast machines are better kept for those that gain most.
          </Answer>
          <p class="aside">
            <b>Dense or hybrid?</b> The notes of the hybrid model are 13 times less for a long prompt. Only then is the
            line not the limit.
          </p>
        </Part>
        <Part number={2} title="Many prompts">
          <p>
            Now 2.4 prompts come each second, and nobody is alone. A <i>threshold</i> decides: prompts with more{" "}
            <i>new</i> tokens than that go, the others stay. New is what must be read; the rim
            around a prompt is known already, from an earlier turn (<i>cached</i>). <b>Move the threshold</b>, with the
            slider or with the round handle in the picture, which are the same, and look for the best place.
          </p>
          {data ? <Many data={data.many} /> : <Loading />}
          <Answer question="What does a lower threshold do?">
            More prompts go. The remote machines and the line fill up until prompts queue there, while machines here
            stand idle. A higher threshold floods the local machines instead. Where both sides are equally busy, most
            prompts are in time.
          </Answer>
        </Part>
        <Part number={3} title="Break it">
          <p>
            The same traffic, and something goes wrong at 1:00. Two policies decide: <i>fixed</i> keeps one threshold, as in
            the paper; <i>adaptive</i> also looks at the queues and the line before each decision.{" "}
            First the line is cut. <b>Press a button</b> to see it again, or to try something else.
          </p>
          {data ? (
            <Trouble data={data.trouble}>
              <Answer question="What happens when the line dies?">
                Prompts whose notes were on the way <b>fall back</b>: they are read again, here. New ones stay here too.
                The local machines are slower, so a queue grows, but every prompt is answered and nobody gets an error.
                Once the line is back, long prompts go again.
              </Answer>
            </Trouble>
          ) : (
            <Loading />
          )}
        </Part>
        <Part number={4} title="Your numbers">
          <p>
            Would it pay for you? The planner has answered for these models, machines, lines and prompts; the fleet with
            a remote site is compared with one site that costs the same.
          </p>
          {data ? <Yours data={data.yours} isServed={isServed} /> : <Loading />}
        </Part>
        <Part number={5} title="This deployment, now">
          <Now isServed={isServed} />
        </Part>
        <section class="closing">
          <h2>What to remember</h2>
          <ol>
            <li>
              <b>Long prompts go</b>, because fast machines save more the more there is to read, and the notes travel
              meanwhile.
            </li>
            <li>
              <b>Short prompts stay</b>, because the trip costs more than it saves.
            </li>
            <li>
              <b>A lower threshold sends more</b>, until the remote site and the line are the queue.
            </li>
            <li>
              <b>When the line dies</b>, everything is read at home: slower, without errors.
            </li>
          </ol>
          <p class="quiet">
            Times, bytes and verdicts are those of prfaas: its planner with the case study of{" "}
            <a href="https://arxiv.org/abs/2604.15039">arXiv:2604.15039</a> (32 H200 there, 64 H20 here), and its
            simulator, which runs the code that routes live traffic.
          </p>
        </section>
      </main>
    </>
  );
}

function Part({ number, title, children }: { number: number; title: string; children: ComponentChildren }) {
  return (
    <section class="part" id={`part-${number}`}>
      <h2>
        <span>{number}</span> {title}
      </h2>
      {children}
    </section>
  );
}

function Answer({ question, children }: { question: string; children: ComponentChildren }) {
  return (
    <div class="answer">
      <h3>{question}</h3>
      <p>{children}</p>
    </div>
  );
}

function Loading() {
  return <div class="loading" aria-hidden="true" />;
}

function Theme() {
  const flip = () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try {
      localStorage.setItem("prfaas-theme", root.dataset.theme);
    } catch {
      // A page from a folder may have no storage; the choice lasts as long as the page.
    }
  };
  return (
    <button type="button" onClick={flip} title="Light or dark" aria-label="Light or dark">
      ◐
    </button>
  );
}
